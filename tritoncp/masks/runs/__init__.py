"""Patterns of blocks: runs of blocks by row or by column, and torch's index lists."""
