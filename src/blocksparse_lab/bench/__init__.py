"""Measuring: alternating timing, machine facts, correctness first, reports."""
