"""The command `tritoncp chunk`, and the sample graphs that it orders."""
