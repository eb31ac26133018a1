"""Graphs on two streams, computation and communication: predicted timeline, and order of the nodes."""
