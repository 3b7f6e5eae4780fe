"""Tasks of one iteration, one verb each."""
