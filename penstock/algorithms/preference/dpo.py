"""Direct preference optimization, and its conservative form for labels that are sometimes wrong.

Sources: Rafailov et al. 2023 (arXiv 2305.18290), equation 7; label smoothing (cDPO): Mitchell 2023, "A note on DPO
with noisy preferences & relationship to IPO".

Shapes: _P pairs.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt

from penstock.algorithms.preference.types import PairInputs, PreferenceOutputs, log_ratio_differences

PAPER = "2305.18290"


def dpo(
    inputs: PairInputs,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
) -> PreferenceOutputs:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) with the margin m = beta x difference of log-ratios.

    Args:
        inputs: with reference log-probs.
        beta: strength of the pull to the reference.
        label_smoothing: e, the share of pairs whose label is taken to be the wrong way round.

    Note:
        With ``label_smoothing`` it is cDPO.
    """
    from torch.nn.functional import logsigmoid

    margin_P = beta * log_ratio_differences(inputs)
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return PreferenceOutputs(loss_P, margin_P.detach())
