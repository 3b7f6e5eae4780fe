"""Which experts of a mixture tokens take while vLLM samples them."""
