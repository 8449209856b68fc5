"""Files that are broken by chance or on purpose, and what every reader must do with them."""
