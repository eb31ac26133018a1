"""Reports of a history: comparison, change points, a self-contained page, the README's figures."""
