"""Generations of games, in which the policy plays several agents."""
