"""Drawings of a plan: rasters, the picture and the HTML page.

May import: masks, mods, core.
"""
