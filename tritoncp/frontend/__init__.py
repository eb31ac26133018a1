"""Turns the arguments of a call into a checked plan: validation, plan cache, mask sources, Dynamo.

May import: ops, distributed, planning, masks, mods, core.
"""
