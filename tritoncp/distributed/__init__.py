"""The only bytes between ranks: collectives, groups, consistency checks, schedules.

May import: planning, masks, mods, core, kernels.
"""
