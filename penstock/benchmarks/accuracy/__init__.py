"""Held-out accuracy of every algorithm, and the page that tells of it."""
