"""What commands do with runs that are there."""
