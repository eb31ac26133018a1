"""Reference attention in plain torch: the dense oracle, usually in float64, and the eager engine.

May import: planning, masks, core.
"""
