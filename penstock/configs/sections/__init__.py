"""One file per section of a recipe."""
