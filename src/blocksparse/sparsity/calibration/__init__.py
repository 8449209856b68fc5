"""Pruning of trained models with calibration data, without training."""
