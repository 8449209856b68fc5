"""Methods that make dense weights block-sparse during training."""
