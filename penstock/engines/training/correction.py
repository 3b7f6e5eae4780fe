"""The correction's part of an actor's update: what it needs to know of a whole mini-batch, and its figures.

Left out: the formulas (penstock/algorithms/correction.py), and where weights and rejection enter the loss
(penstock/engines/training/updates.py).

Suffixes: `_T` response tokens, `_B` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.algorithms.correction import Corrected, Correction, correct, mean_weight, mismatch_figures
from penstock.algorithms.policy_losses.types import PolicyLossInputs
from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import PackedBatch, Rows

PREFIX = "mismatch/"


def correct_batch(batch: PackedBatch, inputs: PolicyLossInputs, correction: Correction) -> Corrected:
    """Weigh and reject the tokens of a micro-batch.

    Where the ratio is to the rollout's own log-probs, their divergence is measured from the current policy.
    """
    old_T = inputs.old_logprobs_T if correction.proximal == "recomputed" else inputs.logprobs_T.detach()
    mean = batch.columns.get("weight_mean", 1.0)
    return correct(old_T, batch.columns["logprobs_rollout"], batch.mask_T, batch.offsets_B1, correction, mean)


def named_sums(corrected: Corrected) -> dict[str, torch.Tensor]:
    """The sums of a micro-batch as an optimizer step reports them."""
    return {PREFIX + name: value for name, value in corrected.sums.items()}


def with_weight_mean(rows: Rows, index_B: np.ndarray, correction: Correction) -> Rows:
    """Add the column `weight_mean`, the same number for every token: the mean weight of the mini-batch.

    Every rank sees the whole mini-batch here, so neither the split nor the number of ranks changes the mean.
    """
    names = ("logprobs_old", "logprobs_rollout")
    mask = rows.mask.take(index_B)
    old_T, rollout_T = (torch.from_numpy(rows.columns[name].take(index_B).values_T) for name in names)
    mask_T, offsets_B1 = torch.from_numpy(mask.values_T.astype(np.float32)), torch.from_numpy(mask.offsets_B1)
    mean = mean_weight(old_T, rollout_T, mask_T, offsets_B1, correction)
    mean_T = np.full(len(rows.mask.values_T), mean, np.float32)
    return replace(rows, columns={**rows.columns, "weight_mean": Ragged(mean_T, rows.mask.offsets_B1)})


def with_mismatch(
    metrics: Mapping[str, float], differences: Sequence[torch.Tensor], device: torch.device
) -> dict[str, float]:
    """Make figures of an update's sums, and of the largest difference of probabilities in each of its micro-batches.

    Every rank calls it, since the largest difference is that of all ranks.
    """
    sums = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    if not sums:  # no token counted, on any rank
        return dict(metrics)
    largest = torch.stack(list(differences)).max().to(device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    figures = mismatch_figures(sums) | {"probability_difference_max": float(largest)}
    others = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    return others | {PREFIX + name: value for name, value in figures.items()}
