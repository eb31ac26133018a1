"""Calls with keys that are selected at run time: what their engines read, and their probabilities."""
