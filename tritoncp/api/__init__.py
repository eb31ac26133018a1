"""The calls that users make: attention, plans, shards, simulated worlds, packed sequences; their checks, plan
cache and graphs.

May import: every package below: ops, distributed, reference, planning, masks, mods, core, kernels.
"""
