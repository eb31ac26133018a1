"""Translation of a traced torch graph to Triton source: of one attention score or mask value, and its
gradient."""
