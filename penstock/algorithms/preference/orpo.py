"""Odds ratio preference optimization: supervised training on the chosen response plus a penalty, without reference.

Source: Hong et al. 2024 (arXiv 2403.07691), equations 4, 6 and 7. The probability of a response is the geometric mean
over its tokens.

Shapes: _B rows, _P pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from penstock.algorithms.preference.types import PairInputs, PreferenceOutputs, mean_logprobs

if TYPE_CHECKING:
    from torch import Tensor

PAPER = "2403.07691"
REFERENCE = False
CERTAIN = -1e-6  # log-probs above count as this: the odds of a certain response are infinite


def orpo(inputs: PairInputs, *, odds_weight: Annotated[float, Gt(0)] = 0.1) -> PreferenceOutputs:
    """NLL of the chosen response, mean over its tokens, - odds_weight x log sigmoid(log odds ratio).

    The margin reported is odds_weight x the log odds ratio.

    Args:
        inputs: without reference log-probs.
        odds_weight: weight of the odds ratio, the paper's lambda.

    Note:
        The likelihood term is the mean over a response's tokens, then over pairs: long responses weigh no more.
    """
    from torch.nn.functional import logsigmoid

    means_B = mean_logprobs(inputs)
    odds_B = log_odds(means_B)
    ratio_P = odds_B[inputs.chosen_P] - odds_B[inputs.rejected_P]
    loss_P = -means_B[inputs.chosen_P] - odds_weight * logsigmoid(ratio_P)
    return PreferenceOutputs(loss_P, odds_weight * ratio_P.detach())


def log_odds(logprobs_B: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logprobs), without loss of digits near p = 0 and p = 1."""
    import torch

    below_B = logprobs_B.clamp(max=CERTAIN)
    # Of the two ways to write log(1 - p) each is exact on its side of 1/2.
    rest_B = torch.where(below_B > -math.log(2), torch.log(-torch.expm1(below_B)), torch.log1p(-torch.exp(below_B)))
    return below_B - rest_B
