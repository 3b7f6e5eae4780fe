"""What a recipe needs with a model that need not be there."""
