"""Layers of papers that have no block-sparse weight of their own; their names are in `blocksparse.nn`."""
