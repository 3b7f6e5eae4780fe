"""Checks before anything starts."""
