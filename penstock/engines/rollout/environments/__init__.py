"""What the rollout engine knows of environments."""
