"""Keys that a model chooses at run time: their record, the choice by scores, and their lists for engines."""

from tritoncp.selection.selection import Selection, SelectionAuxOutput, SelectionAuxRequest

__all__ = ["Selection", "SelectionAuxOutput", "SelectionAuxRequest"]
