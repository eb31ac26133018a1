"""`tritoncp autotune`: measure tile shapes, and write down the shapes that beat the rule.

May import every package of the spine, the cases and histories of perf, and `analysis`.
"""
