"""Agents' episodes of several conversations, each of which is learnt from."""
