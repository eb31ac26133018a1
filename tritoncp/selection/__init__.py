"""Keys that a model chooses at run time: the record of a choice, and which of the chosen keys a query sees."""

from tritoncp.selection.selection import Selection

__all__ = ["Selection"]
