"""Execution of one checked call: registered ops, autograd, choice of the engine, tables of tile shapes.

May import: distributed, reference, planning, masks, mods, core, kernels.
"""
