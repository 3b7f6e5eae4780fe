"""The policy gradient as it is, without a ratio; also the loss of group policy gradient.

Sources: Williams 1992, "Simple statistical gradient-following algorithms"; Chu et al. 2025 (GPG, arXiv 2504.02546).

Shapes: _T flat response tokens.
"""

from __future__ import annotations

from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.ratio import ratio_metrics, token_ratio

RATIO = False  # no ratio to the generating policy is in the loss


def reinforce(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """-A log pi(token), whose gradient is exactly -A.

    Nothing corrects for a policy that has moved since it generated: from the second optimizer step of an iteration on
    the gradient is biased, and ``approx_kl`` says how far the policies are apart.

    Note:
        This is GPG's loss as well. Nothing corrects for steps off the policy.
    """
    ratio_T = token_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    metrics_T = ratio_metrics(inputs.logprobs_T, inputs.old_logprobs_T, ratio_T)
    return PolicyLossOutputs(-inputs.advantages_T * inputs.logprobs_T, metrics_T)
