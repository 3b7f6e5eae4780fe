"""Training on preferences: a policy by DPO and its relatives, a reward model by Bradley and Terry.

A unit is a pair, or for KTO one row; its two rows never lie in different micro-batches. A loss is a unit's share of
the whole batch's mean, so neither the split nor the number of ranks changes the gradient
(penstock/algorithms/aggregation.py).

The reference is the model that training starts from: its log-probs are a column of the file, computed before the
first step by the `logprobs` command, so no second model is held. How rows are laid out: `data.preference`.

Suffixes: `_T` response tokens, `_B` rows of a micro-batch, `_U` units. Left out: the losses
(penstock/algorithms/preference, penstock/algorithms/bradley_terry.py), optimizer steps
(penstock/engines/training/trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from penstock.algorithms.bradley_terry import bradley_terry
from penstock.algorithms.preference.types import LabelInputs, PairInputs, PreferenceOutputs
from penstock.algorithms.registry import is_labelled, preference_loss_named
from penstock.algorithms.segments import segment_sum_torch
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedBatch, PackedInTurn, Rows, pack, to_device, uncounted
from penstock.engines.commands.finetuning import PreferenceLoss
from penstock.engines.training.trainer import Trainer, reduce_sums
from penstock.state.experience import column_names, read_columns

Sums = dict[str, torch.Tensor]
REFERENCE = "logprobs_reference"
UNITS, CHOSEN, REJECTED = "units", "chosen", "rejected"  # what is counted
MEAN_OVER = {  # by figure, what its sum is divided by
    "accuracy": UNITS,
    "margin": UNITS,
    "logprobs_chosen": CHOSEN,
    "logprobs_rejected": REJECTED,
    "score_chosen": CHOSEN,
    "score_rejected": REJECTED,
    "kl": UNITS,
}


@dataclass(frozen=True)
class PreferenceRows:
    """Rows of a preference file, and the number of each unit: a label or a margin; 0 where the file has none."""

    rows: Rows
    numbers_U: np.ndarray


@dataclass(frozen=True)
class UnitBatch:
    """Whole units of one micro-batch on the device."""

    packed: PackedBatch
    numbers_U: torch.Tensor
    weight: float  # 0 where no unit fell to this place: some unit runs, to stay in step, and counts nothing


BatchLoss = Callable[[nn.Module, UnitBatch], tuple[torch.Tensor, Sums]]


def rows_together(loss: PreferenceLoss) -> int:
    """Return how many adjacent rows a unit of the loss has."""
    return 1 if loss.name != "bradley_terry" and is_labelled(loss.name) else 2


def rows_of_units(index_U: np.ndarray, together: int) -> np.ndarray:
    """Return the numbers of the rows of units that have `together` adjacent rows each."""
    return (index_U[:, None] * together + np.arange(together)).ravel()


def read_preferences(path: str) -> PreferenceRows:
    """Read a preference file with the columns that it has."""
    names = column_names(path)
    numbers = [name for name in ("label", "margin") if name in names]
    per_token = [REFERENCE] if REFERENCE in names else []
    read = read_columns(path, ["prompt_tokens", "response_tokens", "loss_mask", *per_token, *numbers])
    columns = {name: read[name] for name in per_token}
    rows = Rows(read["prompt_tokens"], read["response_tokens"], read["loss_mask"], columns)
    units = len(rows) // 2
    return PreferenceRows(rows, read[numbers[0]][:units] if numbers else np.zeros(units, np.float32))


def update_on_preferences(
    trainer: Trainer, data: PreferenceRows, index_U: np.ndarray, budget: int, loss: PreferenceLoss, learning_rate: float
) -> dict[str, float]:
    """Take one optimizer step over the given units; return loss, accuracy, margin and log-probs or scores."""
    batches = _batches(data, index_U, budget, rows_together(loss), trainer.device)
    result = trainer.step(batches, _loss(trainer, data, index_U, budget, loss), learning_rate)
    return _means(result.sums) | {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}


@torch.no_grad()
def measure_preferences(trainer: Trainer, data: PreferenceRows, budget: int, loss: PreferenceLoss) -> dict[str, float]:
    """Return the same figures over all units, without a step."""
    index_U = np.arange(len(data.numbers_U))
    batch_loss, totals = _loss(trainer, data, index_U, budget, loss), Sums()
    trainer.engine.eval()
    for batch in _batches(data, index_U, budget, rows_together(loss), trainer.device):
        share, sums = batch_loss(trainer.engine, batch)
        for name, value in {"loss": share, **sums}.items():
            totals[name] = totals[name] + value if name in totals else value
    return _means(reduce_sums(totals, trainer.device))


def _loss(trainer: Trainer, data: PreferenceRows, index_U: np.ndarray, budget: int, loss: PreferenceLoss) -> BatchLoss:
    units = len(index_U)
    if loss.name == "bradley_terry":
        return lambda model, batch: _score_loss(model, batch, units)
    if rows_together(loss) == 2:
        return lambda policy, batch: _pair_loss(policy, batch, units, loss)
    kl = _kl(trainer, data, index_U, budget)
    return lambda policy, batch: _label_loss(policy, batch, units, loss, kl)


def _pair_loss(policy: nn.Module, batch: UnitBatch, units: int, loss: PreferenceLoss) -> tuple[torch.Tensor, Sums]:
    packed = batch.packed
    logprobs_T, _ = policy(packed, 1.0)
    chosen_U = 2 * torch.arange(len(batch.numbers_U), device=logprobs_T.device)
    inputs = PairInputs(logprobs_T, packed.columns.get(REFERENCE), packed.offsets_B1, chosen_U, chosen_U + 1)
    outputs = preference_loss_named(loss.name)(inputs, **loss.settings)
    logprobs_B = segment_sum_torch(logprobs_T.detach(), packed.offsets_B1)
    return _shares(batch, outputs, units, "logprobs", logprobs_B[0::2], logprobs_B[1::2])


def _label_loss(
    policy: nn.Module, batch: UnitBatch, units: int, loss: PreferenceLoss, kl: torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    packed, good_U = batch.packed, batch.numbers_U
    logprobs_T, _ = policy(packed, 1.0)
    inputs = LabelInputs(logprobs_T, packed.columns[REFERENCE], packed.offsets_B1, good_U, kl)
    outputs = preference_loss_named(loss.name)(inputs, **loss.settings)
    logprobs_U = segment_sum_torch(logprobs_T.detach(), packed.offsets_B1)
    share, sums = _shares(batch, outputs, units, "logprobs", good_U * logprobs_U, (1 - good_U) * logprobs_U)
    good, bad = batch.weight * good_U.sum(), batch.weight * (1 - good_U).sum()
    return share, sums | {CHOSEN: good, REJECTED: bad, "kl": kl * sums[UNITS]}


def _score_loss(model: nn.Module, batch: UnitBatch, units: int) -> tuple[torch.Tensor, Sums]:
    scores_B = model(batch.packed)
    chosen_U, rejected_U = scores_B[0::2], scores_B[1::2]
    loss_U = bradley_terry(chosen_U, rejected_U, batch.numbers_U)
    outputs = PreferenceOutputs(loss_U, (chosen_U - rejected_U).detach())
    return _shares(batch, outputs, units, "score", chosen_U.detach(), rejected_U.detach())


def _shares(
    batch: UnitBatch,
    outputs: PreferenceOutputs,
    units: int,
    what: str,
    chosen_U: torch.Tensor,
    rejected_U: torch.Tensor,
) -> tuple[torch.Tensor, Sums]:
    """This micro-batch's share of the mean over units, and sums to report: of figures, and of what divides them.

    `what`: of which the two sides have a figure each, "logprobs" or "score".
    """
    count = batch.weight * torch.ones_like(outputs.margin_U).sum()
    sums = {
        "accuracy": (outputs.margin_U > 0).float().sum() * batch.weight,
        "margin": outputs.margin_U.sum() * batch.weight,
        f"{what}_chosen": chosen_U.sum() * batch.weight,
        f"{what}_rejected": rejected_U.sum() * batch.weight,
        UNITS: count,
        CHOSEN: count,
        REJECTED: count,
    }
    return outputs.loss_U.sum() * (batch.weight / units), sums


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Return the loss, which is a mean already, and each figure's mean; none over a label that no row has."""
    means = {name: sums[name] / sums[over] for name, over in MEAN_OVER.items() if name in sums and sums[over]}
    return {"loss": sums["loss"], **means}


@torch.no_grad()
def _kl(trainer: Trainer, data: PreferenceRows, index_U: np.ndarray, budget: int) -> torch.Tensor:
    """KTO's z0 over the whole batch: the mean log-ratio of prompts with responses to other prompts, at least 0."""
    trainer.engine.eval()
    total = torch.zeros((), device=trainer.device)
    mismatched_U = index_U + len(data.numbers_U)
    for batch in _batches(data, mismatched_U, budget, 1, trainer.device):
        logprobs_T, _ = trainer.engine(batch.packed, 1.0)
        total += batch.weight * (logprobs_T - batch.packed.columns[REFERENCE]).sum()
    torch.distributed.all_reduce(total)
    return (total / len(index_U)).clamp(min=0)


def _batches(
    data: PreferenceRows, index_U: np.ndarray, budget: int, together: int, device: torch.device
) -> PackedInTurn[UnitBatch]:
    """This rank's micro-batches, whole units each; every rank gets the same number of them."""
    index_B = rows_of_units(index_U, together)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = plan_micro_batches(data.rows, world, budget, index_B, together)[rank]
    return PackedInTurn(plan, lambda micro: _batch(data, micro, together, device))


def _batch(data: PreferenceRows, micro: list[int], together: int, device: torch.device) -> UnitBatch:
    index = micro or list(range(together))
    units_U = np.asarray(index[::together]) // together % len(data.numbers_U)  # a mismatched row is its unit's too
    numbers_U = to_device(data.numbers_U[units_U].astype(np.float32), device)
    packed = pack(data.rows, micro, device) if micro else pack(uncounted(data.rows, index), index, device)
    return UnitBatch(packed, numbers_U, 1.0 if micro else 0.0)
