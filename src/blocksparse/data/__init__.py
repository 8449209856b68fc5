"""Loaders: text as bytes."""
