"""The work that is measured: models with random weights, prompts, rewards and made-up experience."""
