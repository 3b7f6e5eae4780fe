"""Tasks of a sweep: begin a training, take note of one that has ended, report."""
