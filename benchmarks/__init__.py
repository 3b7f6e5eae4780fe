"""Measurements with JSON results, behind `penstock bench`. One file per benchmark; benchmarks/README.md lists them."""
