"""PTX arithmetic on NumPy arrays with one element per thread."""
