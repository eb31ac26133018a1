"""Memories of a launch, with checks of all accesses."""
