"""Histories of measurements: their file format, and imports into them."""
