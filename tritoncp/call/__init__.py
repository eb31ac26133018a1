"""One call on one rank: checks, plan, record and facts, engine, autograd node, comparison between ranks.

May import: graph, measured_tiles, distributed, reference, cpu, planning, masks, mods, core, kernels.
"""
