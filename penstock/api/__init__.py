"""Penstock from Python: what `import penstock` offers to a program or a notebook (docs/python.md)."""
