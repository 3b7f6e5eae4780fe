"""The loss of a reward model on pairs, by the model of Bradley and Terry (1952).

Source: Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the margin: Touvron et al. 2023 (Llama 2, arXiv 2307.09288),
equation 2.

Shapes: _P pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected - margin), shape _P.

    Args:
        chosen_P: scores of the preferred responses.
        rejected_P: scores of the others.
        margin_P: by how much the scores should differ at least; 0 where nothing is known of it.
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(chosen_P - rejected_P - margin_P)
