"""Methods for models that are sparse from the first training step."""
