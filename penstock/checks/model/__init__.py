"""Checks of the model: its folder, its family, and what is asked of it."""
