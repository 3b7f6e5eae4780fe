"""Environments: what answers the policy in an episode of several turns. No torch and no vLLM here."""
