"""Runs one checked call: registered ops, choice of engine, call specification, tile tables.

May import: distributed, reference, planning, masks, mods, core, kernels.
"""
