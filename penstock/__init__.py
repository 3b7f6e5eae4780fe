"""Penstock: what is neither a flow, a task, an engine, a configuration nor mathematics, in rooms of its own."""

__version__ = "0.1.0"
