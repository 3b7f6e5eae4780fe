"""Ranks that benchmarks start in place of the engines' own: one that replies without a model, one that saves."""
