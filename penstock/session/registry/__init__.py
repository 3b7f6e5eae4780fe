"""Models of runs in the tracker's registry: what a version says of its run, and which version is best."""
