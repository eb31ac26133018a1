"""Context-parallel flex attention in Triton."""
