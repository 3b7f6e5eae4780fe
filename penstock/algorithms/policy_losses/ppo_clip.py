"""The clipped surrogate of PPO, with separate bounds below and above and an optional second clip.

Sources: Schulman et al. 2017 (arXiv 1707.06347), equation 7; a higher upper bound, Yu et al. 2025 (DAPO, arXiv
2503.14476), equation 8; dual clip, Ye et al. 2020 (arXiv 1912.09729), equation 5.

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt

from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

ALGORITHMS = (
    Algorithm(
        name="dapo",
        advantage="grpo",
        policy_loss="ppo_clip",
        description="GRPO with more room above than below the ratio, and every token of the batch weighing the same",
        paper="2503.14476",
        defaults={"clip_high": 0.28},
    ),
)


def ppo_clip(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, Ge(0)] = 0.2,
    clip_high: Annotated[float, Ge(0)] = 0.2,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> PolicyLossOutputs:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and no more than -dual_clip A where A < 0.

    The ratio is exactly 1 where ``old_logprobs_T`` is ``logprobs_T.detach()``, and the gradient there exactly -A.

    Args:
        inputs: a micro-batch.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage, where the first clip leaves the loss
            unbounded; None for no bound.

    Returns:
        The loss, and the metrics ``clip_fraction`` (1 where either clip decided the loss), ``ratio`` and ``approx_kl``.

    Note:
        The dual clip bounds the loss to at most ``-dual_clip A`` where ``A < 0``.

    Raises:
        ValueError: ``dual_clip`` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds a ratio from above and has to exceed 1, not {dual_clip}")
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    unclipped_T = -inputs.advantages_T * ratio_T
    loss_T = unclipped_T.maximum(-inputs.advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        bounded_T = loss_T.minimum(-inputs.advantages_T * dual_clip)
        loss_T = bounded_T.where(inputs.advantages_T < 0, loss_T)
    return PolicyLossOutputs(
        loss_T, ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T, loss_T != unclipped_T)
    )
