"""Reference attention in plain torch, usually in float64, for tests and `tritoncp check`.

May import: masks, core.
"""
