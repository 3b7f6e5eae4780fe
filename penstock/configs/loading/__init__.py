"""Recipes from files and overrides to the tree, and the tree as keys and as a form."""
