"""Arithmetic of PTX on NumPy arrays with one element per thread."""
