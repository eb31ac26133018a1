"""The command `tritoncp chunk` and the figures of docs/chunking.md, for sample graphs."""
