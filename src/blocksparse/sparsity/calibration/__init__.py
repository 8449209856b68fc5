"""Pruning after training, with some data: scores by activations, and values that reconstruct the outputs."""
