"""Memories of a launch, with the checks of accesses by threads."""
