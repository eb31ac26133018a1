"""The CPU engine: attention steps as in the Triton kernels, by torch's flash kernel and batched products."""
