"""Predicted times of our GPU kernels: `compile` counts what launches do, `model` turns the counts into seconds."""
