"""Bounds of numbers that come from users' code, servers and recipes alike."""

from __future__ import annotations

# Larger ones leave no room for float32: gradients are sums over a batch's tokens of what rewards become, and their
# norm is a sum of squares (at most 3e38).
LARGEST_REWARD = 1e12
