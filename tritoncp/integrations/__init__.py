"""Adapters for libraries that people train with; each module imports its library, nothing else of the package imports them."""
