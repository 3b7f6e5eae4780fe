"""Tasks of trainings without rollout."""
