"""`tritoncp check`: compares every schedule with dense float64 attention, for masks that use different
kernels.
"""
