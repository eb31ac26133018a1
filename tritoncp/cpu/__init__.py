"""The CPU engine: the kernels' step contract in blocks, from torch's own flash kernel and batched products."""
