"""The importance ratio between the actor and the policy that generated, per token and per sequence, and its metrics.

Ratios are computed from log-ratios bounded to +-20: exp overflows float32 at 88. Beyond the bound the gradient is 0,
and rightly: it is vanishing at the lower end, and e^20 times too large at the upper, on a token about which the old
samples tell nothing any more. A loss that stops the gradient of its ratio keeps that of the log-probability.

Shapes: _T flat response tokens of a packed micro-batch, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algorithms.kl import LOG_RATIO_BOUND, kl_estimate
from penstock.algorithms.segments import rows_of_tokens, segment_sum_torch

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """pi(token) / pi_old(token), _T, with gradient; exactly 1 where the old log-probabilities are the current ones."""
    return (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_ratio(log_ratio_T: Tensor, mask_T: Tensor, offsets_B1: Tensor) -> Tensor:
    """exp(mean of the log-ratios over a row's counted tokens), given to each of its tokens, _T; 1 without any.

    The value is the sequence's, the gradient goes through each token's own log-ratio (GSPO-token, arXiv 2507.18071,
    equation 14). Where all tokens of a row have one advantage, the sum over them has the gradient of the sequence's
    ratio; and no gradient is gathered over rows, which on a GPU would add in varying order.
    """
    still_T = log_ratio_T.detach()
    tokens_B = segment_sum_torch(mask_T, offsets_B1).clamp(min=1)
    mean_B = segment_sum_torch(still_T * mask_T, offsets_B1) / tokens_B
    mean_T = mean_B.index_select(0, rows_of_tokens(offsets_B1, still_T.shape[0]))
    return (mean_T + (log_ratio_T - still_T)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ratio_metrics(
    logprobs_T: Tensor, old_logprobs_T: Tensor, ratio_T: Tensor, clipped_T: Tensor | None = None
) -> dict[str, Tensor]:
    """The metrics of a loss with a ratio: ``ratio``, ``approx_kl``, and ``clip_fraction`` where it clips, detached.

    ``approx_kl`` is the k3 estimate of the divergence of the generating policy from the actor.
    """
    metrics_T = {
        "ratio": ratio_T.detach(),
        "approx_kl": kl_estimate(old_logprobs_T, logprobs_T.detach(), "k3"),
    }
    if clipped_T is not None:
        metrics_T["clip_fraction"] = clipped_T.detach().to(ratio_T.dtype)
    return metrics_T
