"""The CPU engine: computes the attention steps of the Triton kernels with torch's flash kernel and batched
products."""
