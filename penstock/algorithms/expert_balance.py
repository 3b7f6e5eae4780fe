"""How evenly the router of a mixture spreads tokens over its experts: a loss that asks for it, and a figure.

Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), equations 4 to 6; with several experts per token as
the Transformers library has it, but for each layer by itself: experts of two layers cannot make up for each other.
Suffixes: `_NE` tokens of a micro-batch times experts, `_E` experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def expert_balance(logits_NE: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Return a router's balance loss, and how many times its fair share of tokens the fullest expert has.

    The loss is E times the sum over experts of (share of tokens that chose it) x (mean probability): `chosen` where all
    are used alike, and at most E. Its gradient goes through the probabilities.

    Args:
        logits_NE: the router's.
        chosen: experts of each token.
    """
    tokens, experts = logits_NE.shape
    probabilities_NE = logits_NE.float().softmax(-1)
    choices = probabilities_NE.topk(chosen, -1).indices.flatten()
    ones = probabilities_NE.new_ones(choices.shape)
    share_E = probabilities_NE.new_zeros(experts).scatter_add(0, choices, ones) / tokens
    loss = experts * (share_E * probabilities_NE.mean(0)).sum()
    return loss, share_E.max() * experts / chosen
