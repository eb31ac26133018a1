"""The CPU engine: the kernels' step contract in blocks, by torch's flash kernel and batched products."""
