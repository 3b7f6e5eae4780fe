"""Measurements with JSON results, behind `penstock bench`. Each file here is one; README.md lists them."""
