"""Estimators that take a response's own return, without a critic and without other samples of its prompt."""
