"""Tasks: one verb per file, handles in, handles out. Heavy imports stay inside function bodies."""
