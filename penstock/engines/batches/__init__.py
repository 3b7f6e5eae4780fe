"""Rows packed side by side, and the micro-batches they are cut into."""
