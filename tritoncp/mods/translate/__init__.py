"""Translation of a traced torch graph of one attention element to Triton source, and of its gradient."""
