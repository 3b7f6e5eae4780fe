"""What a training keeps so that it can go on: snapshots in memory of its hosts, checkpoints written behind its back."""
