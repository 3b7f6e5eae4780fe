"""Tasks of a stream: the actor learns from a portion of the batch while others are generated."""
