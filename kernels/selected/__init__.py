"""Kernels of keys that are selected at run time."""
