"""Compiles kernels for GPUs that are not here, and reads the machine code.

May import: every package but api's users.
"""
