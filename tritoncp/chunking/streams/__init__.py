"""Graphs on two streams, computation and communication: the predicted timeline, and the order of nodes."""
