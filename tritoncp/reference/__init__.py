"""The right answer in plain torch: dense float64 attention and the eager engine.

May import: planning, masks, core.
"""
