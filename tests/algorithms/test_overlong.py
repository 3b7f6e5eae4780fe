"""The soft punishment of long responses against numbers worked out by hand.

Invariant: it never rewards, never exceeds the penalty, and shorter is never worse.
"""

from __future__ import annotations

import numpy as np

from penstock.algorithms.overlong import overlong_penalty


def test_by_hand() -> None:
    """Limit 20, buffer 5, penalty 2: free up to 15, then 2 / 5 a token; at the limit, and beyond it, all of it."""
    penalties_B = overlong_penalty(np.array([0, 15, 16, 18, 20, 25]), max_tokens=20, buffer_tokens=5, penalty=2.0)
    np.testing.assert_allclose(penalties_B, [0, 0, -0.4, -1.2, -2, -2], atol=1e-15)


def test_bounds_and_order() -> None:
    penalties_B = overlong_penalty(np.arange(100), max_tokens=80, buffer_tokens=80, penalty=0.3)
    assert (np.diff(penalties_B) <= 0).all()
    assert penalties_B.max() == 0
    assert penalties_B.min() == -0.3
