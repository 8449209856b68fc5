"""Training runs as plain functions; the command line shows them."""
