"""Tasks of offline trainings."""
