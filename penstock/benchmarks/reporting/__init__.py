"""Results as files, tables, comparisons and pictures."""
