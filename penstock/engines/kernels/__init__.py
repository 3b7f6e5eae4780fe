"""Attention, language head and products of matrices, as fast as the device allows."""
