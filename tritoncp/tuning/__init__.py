"""`tritoncp autotune`: measures tile shapes, and stores those that are faster than the built-in default.

May import `api` and every layer below, the cases and histories of perf, and `analysis`.
"""
