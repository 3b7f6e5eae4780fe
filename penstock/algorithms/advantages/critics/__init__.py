"""Estimators that judge a token by the values of a trained critic."""
