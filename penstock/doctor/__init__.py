"""What this machine has, and what would slow or stop a run on it."""
