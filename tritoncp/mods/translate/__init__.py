"""Translation to Triton source of a traced torch graph of one attention score or mask value, and its
gradient."""
