"""Histories of measurements: their file format, readers and writers."""
