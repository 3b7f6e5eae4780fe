"""What a dataflow of a user's own adds to the steps of an iteration."""
