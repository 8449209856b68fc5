"""Files that are broken by chance or on purpose, and how every reader must treat them."""
