"""DeepSpeed around a model: updates and their parts."""
