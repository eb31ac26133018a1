"""The public functions: attention, plans, shards, simulated worlds, packed sequences; with their argument
checks.

May import: every package below: call, graph, distributed, reference, planning, masks, mods, core, kernels.
"""
