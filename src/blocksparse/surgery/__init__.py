"""Which weights of a model can be replaced, replacing them, and the optimizer state that follows."""
