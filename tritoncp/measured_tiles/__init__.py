"""Tile shapes that `tritoncp autotune` measured: files, look-up for a call, autotuning at a first call.

May import: distributed, planning, masks, core, kernels.
"""
