"""Routes of the forward pass other than the loops over tiles, and the check of their first results."""
