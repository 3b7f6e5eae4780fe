"""The soft punishment of responses that come near the length limit.

Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.

Shapes: _B rows.
"""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths_B: np.ndarray, *, max_tokens: int, buffer_tokens: int, penalty: float) -> np.ndarray:
    """0 up to max_tokens - buffer_tokens, then falling in proportion to the length to -penalty at max_tokens.

    Args:
        lengths_B: tokens of each response.
        max_tokens: the length at which a response is cut.
        buffer_tokens: length of the slope, tokens.
        penalty: what a response of full length loses.
    """
    beyond_B = lengths_B.astype(np.float64) - (max_tokens - buffer_tokens)
    return -penalty * np.clip(beyond_B / buffer_tokens, 0.0, 1.0)
