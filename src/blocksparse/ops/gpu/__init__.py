"""Tiles, plans, launches and device functions of the GPU backends of all ops."""
