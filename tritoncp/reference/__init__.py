"""Reference attention in plain torch, usually in float64: the oracle of the tests and of `tritoncp check`.

May import: masks, core.
"""
