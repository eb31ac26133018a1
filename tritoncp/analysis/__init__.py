"""Compiles kernels for absent GPUs, and reads the machine code.

May import every package of the spine, the cases of perf, and other commands and tools, but not `cli`.
"""
