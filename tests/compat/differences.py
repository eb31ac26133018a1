"""Rows of the table of differences from torch, docs/compatibility.md."""

from pathlib import Path

DIFFERENCES = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()


def documented(row: str) -> None:
    """Assert that the table of differences has this row."""
    assert f"| **{row}** |" in DIFFERENCES
