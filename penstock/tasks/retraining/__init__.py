"""Tasks of a retraining: the newest data, the training that follows from them, the verdict on its model."""
