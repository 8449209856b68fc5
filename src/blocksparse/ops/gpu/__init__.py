"""What the GPU backends of all ops share: tiles, plans, launches, device functions."""
