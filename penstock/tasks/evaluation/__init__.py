"""Tasks of an evaluation by itself: what is evaluated, on which engines, and what is kept of it."""
