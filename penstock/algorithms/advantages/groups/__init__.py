"""Estimators that compare the samples of a prompt with each other, without a critic."""
