"""Methods that make dense weights block-sparse while they are trained."""
