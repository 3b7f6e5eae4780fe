"""vLLM in the actor's process: requests, episodes, the scheduler beside it."""
