"""What a rank does with its models, one file per role."""
