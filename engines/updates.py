"""The updates of actor, critic and supervised model: experience rows in, optimizer steps and metrics out.

Each builds the loss of one micro-batch from the pure functions of algorithms/ and leaves splitting to packing.py and
stepping to trainer.py. Suffixes: `_T` response tokens of a micro-batch, `_B` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from algorithms.aggregation import Denominators, aggregate
from algorithms.kl import kl_estimate
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.policy_losses.types import PolicyLossInputs
from algorithms.segments import segment_sum
from algorithms.value_losses import clipped_value_loss
from engines.packing import PackedBatch, Rows, pack, plan_micro_batches
from engines.trainer import Trainer

Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Split:
    """How experience is cut into optimizer steps and micro-batches; the same on every rank."""

    mini_batches: int
    epochs: int
    samples: int  # rows per prompt: a mini-batch holds whole groups
    micro_batch_tokens: int
    max_response_tokens: int
    aggregation: str
    seed: int


@dataclass(frozen=True)
class ActorLoss:
    """Settings of the actor's loss in force at this iteration."""

    policy_loss: str
    settings: dict[str, Any]
    temperature: float
    entropy_coefficient: float
    kl_estimator: str | None
    kl_coefficient: float


def update_actor(trainer: Trainer, rows: Rows, split: Split, loss: ActorLoss, learning_rate: float) -> dict[str, float]:
    """Run all optimizer steps of one iteration; return metrics averaged over counted tokens.

    Without a column of old log-probs the update is on-policy: the old ones are the current ones, and the ratio is
    exactly 1.
    """

    def actor_loss(policy: nn.Module, batch: PackedBatch, denominators: Denominators) -> tuple[torch.Tensor, Sums]:
        entropy = "gradient" if loss.entropy_coefficient else "value"
        logprobs_T, entropies_T = policy(batch, loss.temperature, entropy)
        old_T = batch.columns.get("logprobs_old", logprobs_T.detach())
        inputs = PolicyLossInputs(logprobs_T, old_T, batch.columns["advantages"], batch.mask_T, batch.offsets_B1)
        outputs = POLICY_LOSSES[loss.policy_loss](inputs, **loss.settings)
        loss_T, metrics_T = outputs.loss_T, {**outputs.metrics_T, "entropy": entropies_T}
        if loss.entropy_coefficient:
            loss_T = loss_T - loss.entropy_coefficient * entropies_T
        if loss.kl_estimator:
            kl_T = kl_estimate(logprobs_T, batch.columns["logprobs_reference"], loss.kl_estimator)
            loss_T = loss_T + loss.kl_coefficient * kl_T
            metrics_T["kl"] = kl_T
        share = aggregate(loss_T, batch.mask_T, batch.offsets_B1, split.aggregation, denominators)
        return share, {name: (value.detach() * batch.mask_T).sum() for name, value in metrics_T.items()}

    return _run(trainer, rows, split, actor_loss, learning_rate)


def update_critic(
    trainer: Trainer, rows: Rows, split: Split, clip: float | None, learning_rate: float
) -> dict[str, float]:
    """Run all optimizer steps of one iteration on the value loss; return metrics."""

    def critic_loss(critic: nn.Module, batch: PackedBatch, denominators: Denominators) -> tuple[torch.Tensor, Sums]:
        columns = batch.columns
        loss_T, clipped_T = clipped_value_loss(critic(batch), columns["values"], columns["returns"], clip=clip)
        share = aggregate(loss_T, batch.mask_T, batch.offsets_B1, split.aggregation, denominators)
        return share, {"clip_fraction": (clipped_T * batch.mask_T).sum()}

    return _run(trainer, rows, split, critic_loss, learning_rate)


def update_supervised(
    trainer: Trainer, rows: Rows, index_B: np.ndarray, budget: int, learning_rate: float
) -> dict[str, float]:
    """Take one optimizer step on the cross-entropy of response tokens, every token weighing the same."""

    def cross_entropy(policy: nn.Module, batch: PackedBatch, denominators: Denominators) -> tuple[torch.Tensor, Sums]:
        logprobs_T, _ = policy(batch, 1.0, "none")
        return aggregate(-logprobs_T, batch.mask_T, batch.offsets_B1, "token-mean", denominators), {}

    metrics = _step(trainer, rows, index_B, budget, 1, cross_entropy, learning_rate)
    return metrics or {}


BatchLoss = Callable[[nn.Module, PackedBatch, Denominators], tuple[torch.Tensor, Sums]]


def _run(trainer: Trainer, rows: Rows, split: Split, loss: BatchLoss, learning_rate: float) -> dict[str, float]:
    steps = [
        metrics
        for index_B in mini_batch_rows(len(rows), split)
        if (
            metrics := _step(
                trainer, rows, index_B, split.micro_batch_tokens, split.max_response_tokens, loss, learning_rate
            )
        )
    ]
    if not steps:
        return {"steps": 0.0}
    mean = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
    return {**mean, "learning_rate": steps[-1]["learning_rate"], "steps": float(len(steps))}


def _step(
    trainer: Trainer,
    rows: Rows,
    index_B: np.ndarray,
    budget: int,
    max_tokens: int,
    loss: BatchLoss,
    learning_rate: float,
) -> dict[str, float] | None:
    """One optimizer step over the given rows; None where no token counts (every rank sees the same)."""
    counted_B = segment_sum(rows.mask.values_T, rows.mask.offsets_B1)[index_B]
    if not counted_B.any():
        return None
    denominators = Denominators(float(counted_B.sum()), float((counted_B > 0).sum()), float(max_tokens))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = plan_micro_batches(rows.lengths_B[index_B], world, budget)[rank]
    batches = [pack(rows, index_B[micro].tolist(), trainer.device) for micro in plan]
    result = trainer.step(batches, lambda module, batch: loss(module, batch, denominators), learning_rate)
    means = {name: total / denominators.tokens for name, total in result.sums.items() if name != "loss"}
    return {**means, "loss": result.sums["loss"], "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}


def mini_batch_rows(count: int, split: Split) -> Iterator[np.ndarray]:
    """Yield the rows of each optimizer step: whole prompt groups, in a new seeded order every epoch."""
    groups = np.arange(count).reshape(-1, split.samples)
    for epoch in range(split.epochs):
        order = np.random.default_rng([split.seed, epoch]).permutation(len(groups))
        for part in np.split(groups[order], split.mini_batches):
            yield np.sort(part.reshape(-1))
