"""Prediction and order of a graph on two streams, computation and messages."""
