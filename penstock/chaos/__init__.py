"""Chaos: kill processes of a training at random, and see that it ends as if nothing had happened."""
