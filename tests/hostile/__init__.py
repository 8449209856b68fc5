"""Files that are broken by chance or on purpose, and what every reader has to do with them."""
