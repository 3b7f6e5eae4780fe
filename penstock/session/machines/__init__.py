"""The machines of a training: admitted, brought together, lent, let go."""
