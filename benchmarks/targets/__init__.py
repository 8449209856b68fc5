"""Targets of speed and memory, and how each is measured."""
