"""Families of models: what is trained and served, and how closely the two agree."""
