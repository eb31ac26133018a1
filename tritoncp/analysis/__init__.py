"""`tritoncp inspect`: cross-compilation of kernels for absent GPUs, and reports from the machine code.

May import `api` and every layer below, the cases of perf, and other commands and tools, but not `cli`.
"""
