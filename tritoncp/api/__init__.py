"""The calls that users make: attention, plans, shards, simulated worlds, packed sequences.

May import: every package below: frontend, ops, distributed, reference, planning, masks, mods, core, kernels.
"""
