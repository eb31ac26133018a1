"""Reference attention in plain torch: the dense oracle, usually in float64, and the dense engine.

May import: planning, masks, core.
"""
