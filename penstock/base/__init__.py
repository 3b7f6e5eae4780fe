"""What every room may use: errors, names, files, bounds, ragged rows."""
