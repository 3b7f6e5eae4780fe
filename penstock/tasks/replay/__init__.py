"""A task of an iteration again, outside of its run: what it is given, and what is compared."""
