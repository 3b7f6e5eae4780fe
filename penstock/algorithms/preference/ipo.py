"""Identity preference optimization: the margin is drawn to a fixed size instead of growing without end.

Source: Azar et al. 2023 (arXiv 2310.12036), equation 17; its tau is `beta`. Log-ratios are sums over a response's
tokens, as there. Left out: the mean over tokens that some programs take instead.

Shapes: _P pairs.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from penstock.algorithms.preference.types import PairInputs, PreferenceOutputs, log_ratio_differences

PAPER = "2310.12036"


def ipo(inputs: PairInputs, *, beta: Annotated[float, Gt(0)] = 0.1) -> PreferenceOutputs:
    """(h - 1 / (2 beta))^2, h the difference of log-ratios.

    The margin reported is beta h, which the loss draws to 1/2.

    Args:
        inputs: with reference log-probs.
        beta: strength of the pull to the reference.

    Note:
        ``beta`` is the paper's tau. Log-ratios are sums over a response's tokens, as there, not means.
    """
    difference_P = log_ratio_differences(inputs)
    return PreferenceOutputs((difference_P - 1 / (2 * beta)).square(), beta * difference_P.detach())
