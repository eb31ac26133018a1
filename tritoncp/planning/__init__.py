"""Who owns which block and what moves: balancers, placements, plans, traffic, cost.

May import: masks, mods, core.
"""
