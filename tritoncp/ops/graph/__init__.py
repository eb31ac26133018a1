"""Mods and masks in compiled graphs: their layout, and their captures as inputs of the graph."""
