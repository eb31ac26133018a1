"""The public functions: attention, plans, shards, simulated worlds, packed sequences; with their argument
checks, the plan cache, and their forms in torch.compile's graphs.

May import: every package below: ops, distributed, reference, planning, masks, mods, core, kernels.
"""
