"""Where runs are recorded besides their folder."""
