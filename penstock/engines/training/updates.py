"""The updates of actor, critic and supervised model: experience rows in, optimizer steps and metrics out.

Each builds the loss of one micro-batch from the pure functions of penstock/algorithms/ and leaves splitting to
packing.py and stepping to trainer.py. Suffixes: `_T` response tokens of a micro-batch, `_B` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from penstock.algorithms.aggregation import Denominators, aggregate
from penstock.algorithms.kl import kl_estimate
from penstock.algorithms.policy_losses import Choice
from penstock.algorithms.policy_losses.types import PolicyLossInputs, PolicyLossOutputs
from penstock.algorithms.registry import choice_named, policy_loss_named
from penstock.algorithms.segments import segment_sum
from penstock.algorithms.value_losses import clipped_value_loss
from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedBatch, PackedInTurn, Rows, pack
from penstock.engines.commands.update import ActorLoss, Split
from penstock.engines.kernels.lm_head import Head
from penstock.engines.models.models import PackedPolicy
from penstock.engines.training.correction import correct_batch, named_sums, with_mismatch, with_weight_mean
from penstock.engines.training.full_kl import reference_of
from penstock.engines.training.trainer import Trainer

Sums = dict[str, torch.Tensor]
BatchLoss = Callable[[nn.Module, PackedBatch, Denominators], tuple[torch.Tensor, Sums]]

COMPUTED, BRANCHED = "run/computed", "run/branched"  # sums of tokens; an algorithm's own figures have no such names


def update_actor(
    trainer: Trainer,
    rows: Rows,
    split: Split,
    loss: ActorLoss,
    learning_rate: float,
    reference: Head | None = None,
) -> dict[str, float]:
    """Run all optimizer steps of one iteration; return metrics averaged over counted tokens.

    Without a column of old log-probs the update is on-policy: the old ones are the current ones, and the ratio is
    exactly 1. With the reference's language head and a column of its hidden states the KL is over the vocabulary.
    """
    correction, choose = loss.correction, choice_named(loss.policy_loss)
    differences: list[torch.Tensor] = []

    def prepare(rows: Rows, index_B: np.ndarray) -> Rows:
        if correction is not None and correction.normalize:
            rows = with_weight_mean(rows, index_B, correction)
        return rows if choose is None else with_chosen_tokens(rows, index_B, partial(choose, **loss.choice_settings))

    of_batch = actor_loss(loss, split.aggregation, reference, differences, tells_experts(trainer))
    metrics = _run(trainer, rows, split, of_batch, learning_rate, prepare)
    return metrics if correction is None else with_mismatch(metrics, differences, trainer.device)


def tells_experts(trainer: Trainer) -> bool:
    """Whether the actor is a mixture of experts whose update has figures of their use."""
    return isinstance(trainer.module, PackedPolicy) and trainer.module.tells_experts


def actor_loss(
    loss: ActorLoss,
    aggregation: str,
    reference: Head | None,
    differences: list[torch.Tensor],
    experts: bool,
) -> BatchLoss:
    """Return the actor's loss of a micro-batch.

    Args:
        differences: gets each micro-batch's largest difference of log-probs, where they are corrected.
        experts: whether the actor has experts.
    """
    correction, policy_loss = loss.correction, policy_loss_named(loss.policy_loss)

    def of_batch(policy: nn.Module, batch: PackedBatch, denominators: Denominators) -> tuple[torch.Tensor, Sums]:
        states = None if reference is None else reference_of(batch, reference)
        logprobs_T, entropies_T, *others = policy(batch, loss.temperature, states, experts)
        inputs = PolicyLossInputs(
            logprobs_T,
            batch.columns.get("logprobs_old", logprobs_T.detach()),
            batch.columns["advantages"],
            batch.mask_T,
            batch.offsets_B1,
            batch.columns.get("chosen"),
        )
        outputs = policy_loss(inputs, **loss.settings)
        _check_outputs(loss.policy_loss, outputs, logprobs_T)
        loss_T, metrics_T = outputs.loss_T, {**outputs.metrics_T, "entropy": entropies_T}
        corrected = None if correction is None else correct_batch(batch, inputs, correction)
        if corrected is not None and corrected.weights_T is not None:
            loss_T = loss_T * corrected.weights_T
        if loss.entropy_coefficient:
            loss_T = loss_T - loss.entropy_coefficient * entropies_T
        if loss.kl_estimator:
            kl_T = _sampled_kl(logprobs_T, batch, loss.kl_estimator) if reference is None else others[0]
            loss_T = loss_T + loss.kl_coefficient * kl_T
            metrics_T["kl"] = kl_T
        if experts:
            balance, load = others[-2:]
            if loss.router_loss_coefficient:
                loss_T = loss_T + loss.router_loss_coefficient * balance
            metrics_T |= {"router_loss": balance, "expert_load_max": load}
            if batch.routes_NW is not None:
                metrics_T["routing_mismatch"] = others[-3]
        _check_gradient(loss.policy_loss, loss_T, logprobs_T)
        sums = {name: (value.detach() * batch.mask_T).sum() for name, value in metrics_T.items()}
        if corrected is not None:
            loss_T = loss_T * corrected.kept_T
            sums |= named_sums(corrected)
            differences.append(corrected.largest_difference)
        return aggregate(loss_T, batch.mask_T, batch.offsets_B1, aggregation, denominators), sums

    return of_batch


def _check_outputs(name: str, outputs: object, logprobs_T: torch.Tensor) -> None:
    """Check what a policy loss, perhaps a user's, returned.

    Raises:
        UserError: it is not `PolicyLossOutputs` of tensors with a loss for each token.
    """
    remedy = "see 'An algorithm of your own' in docs/algorithms.md"
    if not isinstance(outputs, PolicyLossOutputs):
        what = f"{type(outputs).__name__}, not penstock.algorithms.policy_losses.types.PolicyLossOutputs"
        raise UserError(f"policy loss '{name}' returned {what}", remedy)
    for column, values in {"loss_T": outputs.loss_T, **outputs.metrics_T}.items():
        if not isinstance(values, torch.Tensor):
            raise UserError(
                f"policy loss '{name}' returned {column} of type {type(values).__name__}, no tensor", remedy
            )
    shape, tokens = tuple(outputs.loss_T.shape), tuple(logprobs_T.shape)
    if shape != tokens:
        raise UserError(f"policy loss '{name}' returned loss_T of shape {shape}, not {tokens}", remedy)


def _check_gradient(name: str, loss_T: torch.Tensor, logprobs_T: torch.Tensor) -> None:
    """Check that there is something to learn from a loss.

    Raises:
        UserError: nothing in it depends on the policy.
    """
    if logprobs_T.requires_grad and not loss_T.requires_grad:
        raise UserError(
            f"policy loss '{name}' has no gradient: its loss_T does not depend on logprobs_T",
            "compute it from logprobs_T, and detach nothing but weights",
        )


def _sampled_kl(logprobs_T: torch.Tensor, batch: PackedBatch, estimator: str) -> torch.Tensor:
    kl_T: torch.Tensor = kl_estimate(logprobs_T, batch.columns["logprobs_reference"], estimator)
    return kl_T


def with_chosen_tokens(rows: Rows, index_B: np.ndarray, choose: Choice) -> Rows:
    """Add the column `chosen`: 1 for the tokens that the loss picks among all counted ones of a mini-batch.

    Every rank sees the whole mini-batch here, so neither the split nor the number of ranks changes the choice.
    """
    inside_B = np.zeros(len(rows), dtype=bool)
    inside_B[index_B] = True
    at_C = np.flatnonzero(np.repeat(inside_B, rows.mask.lengths_B) & (rows.mask.values_T > 0))
    chosen_T = np.zeros(len(rows.mask.values_T), np.float32)
    if at_C.size:
        advantages_C, old_C = (rows.columns[name].values_T[at_C] for name in ("advantages", "logprobs_old"))
        chosen_T[at_C] = choose(advantages_C, old_C)
    return replace(rows, columns={**rows.columns, "chosen": Ragged(chosen_T, rows.mask.offsets_B1)})


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
        logprobs_T, _ = policy(batch, 1.0)
        return aggregate(-logprobs_T, batch.mask_T, batch.offsets_B1, "token-mean", denominators), {}

    metrics = _step(trainer, rows, index_B, budget, 1, cross_entropy, learning_rate)
    return metrics or {}


def _run(
    trainer: Trainer,
    rows: Rows,
    split: Split,
    loss: BatchLoss,
    learning_rate: float,
    prepare: Callable[[Rows, np.ndarray], Rows] | None = None,
) -> dict[str, float]:
    """Take the steps of one iteration; `prepare` sees the rows of each before they are split into micro-batches.

    Figures are means over the steps that were not skipped, or over all steps if every one was.
    """
    steps = []
    for index_B in mini_batch_rows(len(rows), split):
        if rows.accepted_B is not None:
            index_B = index_B[rows.accepted_B[index_B]]
        prepared = prepare(rows, index_B) if prepare else rows
        budget, longest = split.micro_batch_tokens, split.max_response_tokens
        if metrics := _step(trainer, prepared, index_B, budget, longest, loss, learning_rate):
            steps.append(metrics)
    if not steps:
        return {"steps": 0.0}
    taken = [step for step in steps if math.isfinite(step["grad_norm"])] or steps
    mean = {name: float(np.mean([step[name] for step in taken])) for name in steps[0]}
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
    batches = micro_batches(trainer, rows, budget, index_B)
    result = trainer.step(batches, with_run_sums(loss, denominators), learning_rate)
    return {
        **means_and_shares(result.sums, denominators.tokens, int(rows.lengths_B[index_B].sum())),
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "micro_batches": float(len(batches)),
    }


def micro_batches(trainer: Trainer, rows: Rows, budget: int, index_B: np.ndarray) -> PackedInTurn[PackedBatch]:
    """Return this rank's micro-batches of the given rows, of which ranks that compute them together have the same."""
    ranks = trainer.ranks
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = plan_micro_batches(rows, world // ranks.count, budget, index_B)
    return PackedInTurn(plan[rank // ranks.count], lambda micro: pack(rows, micro, trainer.device, ranks))


def with_run_sums(
    loss: BatchLoss, denominators: Denominators
) -> Callable[[nn.Module, PackedBatch], tuple[torch.Tensor, Sums]]:
    """Let a loss also report which tokens its run computes, and which it need not; on the host, where they are known.

    So they are summed over micro-batches and ranks with all else.
    """

    def with_run(module: nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, Sums]:
        share, sums = loss(module, batch, denominators)
        computed, branched = torch.tensor([batch.computed, batch.branched], dtype=torch.float64)
        return share, {**sums, COMPUTED: computed, BRANCHED: branched}

    return with_run


def means_and_shares(sums: dict[str, float], tokens: float, length: int) -> dict[str, float]:
    """Return a step's figures: the loss, means of what was summed, shares of what its runs computed.

    Args:
        sums: over all micro-batches and ranks.
        tokens: that count.
        length: tokens of all rows, with their prompts.
    """
    shares = {"computed_share": sums[COMPUTED] / length, "branched_share": sums[BRANCHED] / length}
    means = {name: total / tokens for name, total in sums.items() if name not in ("loss", COMPUTED, BRANCHED)}
    return {**means, "loss": sums["loss"], **shares}


def mini_batch_rows(count: int, split: Split) -> Iterator[np.ndarray]:
    """Yield the rows of each optimizer step, drawn anew every epoch: rows one by one, or a prompt's together."""
    groups = np.arange(count).reshape(-1, split.together)
    for epoch in range(split.epochs):
        order = np.random.default_rng([split.seed, epoch]).permutation(len(groups))
        for part in np.split(groups[order], split.mini_batches):
            yield np.sort(part.reshape(-1))
