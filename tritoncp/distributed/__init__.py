"""Messages between ranks: collectives, process groups, consistency checks, schedules.

May import: planning, masks, mods, core, kernels.
"""
