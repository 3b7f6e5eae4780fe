"""Estimators that choose the responses to imitate and leave the others out of the loss."""
