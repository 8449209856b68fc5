"""Methods that train a model that is sparse from the first step to the last."""
