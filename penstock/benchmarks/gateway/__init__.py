"""Tokens per second of rollouts whose episodes ask the policy over HTTP, beside the same episodes inside the loop."""
