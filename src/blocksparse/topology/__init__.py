"""Graph measures of layouts."""
