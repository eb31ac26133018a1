"""Compiles kernels for absent GPUs, and reads the machine code.

May import: every package but api's users.
"""
