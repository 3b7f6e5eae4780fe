"""Rows computed as a tree have the log-probs, values and gradients of each row alone, every path its own.

The oracle is `tests.engines.unpacked`: whole rows one at a time, PyTorch's attention, full logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.algorithms.aggregation import Denominators
from penstock.algorithms.policy_losses.types import PolicyLossInputs
from penstock.algorithms.registry import policy_loss_named
from penstock.engines.batches.packing import PackedBatch, pack
from penstock.engines.commands.update import ActorLoss
from penstock.engines.kernels.lm_head import Head, Reference
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedCritic, PackedPolicy
from penstock.engines.training.full_kl import STATES, reference_of
from penstock.engines.training.updates import actor_loss
from tests.engines.rows import LOSS, branched_rows, with_columns
from tests.engines.shared_ranks import Shape
from tests.engines.unpacked import load_unpacked, row_logprobs, row_values

CPU = torch.device("cpu")
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False), Shape("qwen2", tied=True, sliding_window=True)]
TREE = branched_rows()
EVERY = list(range(len(TREE)))
FolderOf = Callable[[Shape], Path]


@pytest.mark.parametrize("shape", SHAPES, ids=["qwen2", "qwen3", "window"])
@torch.no_grad()
def test_log_probs_of_a_tree_are_those_of_each_path_alone(shape: Shape, folder_of: FolderOf) -> None:
    """Also backwards, where each row takes from another than before, and in parts that cut the tree."""
    policy = PackedPolicy(load_causal_lm(folder_of(shape), torch.float32, False)).eval()
    oracle = load_unpacked(folder_of(shape))
    expected = [row_logprobs(oracle, TREE, row, temperature=0.7) for row in EVERY]
    for index in (EVERY, EVERY[::-1], [3, 1, 7], [8, 5]):
        logprobs_T, entropies_T = policy(pack(TREE, index, CPU), 0.7)
        torch.testing.assert_close(logprobs_T, torch.cat([expected[row][0] for row in index]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies_T, torch.cat([expected[row][1] for row in index]), rtol=1e-5, atol=1e-5)


def test_a_shared_token_has_the_gradient_of_every_path(folder_of: FolderOf) -> None:
    """PPO's clipped loss with entropy and KL, advantages of each path's own, against autograd row by row.

    Old log-probs differ from path to path, so that a shared token is clipped in one and not in another. Control: with
    the advantages of the first path for all, as one weight for a shared token would have it, the gradient is another.
    """
    folder = folder_of(SHAPES[0])
    oracle = load_unpacked(folder)
    random = np.random.default_rng(1)
    with torch.no_grad():
        now_T = torch.cat([row_logprobs(oracle, TREE, row)[0] for row in EVERY]).numpy()
    drawn = {name: now_T + random.normal(scale=0.3, size=len(now_T)) for name in ("logprobs_old", "logprobs_reference")}
    rows = with_columns(TREE, drawn)
    batch = pack(rows, EVERY, CPU)
    shared = batch.shared
    assert shared is not None
    settings = {**LOSS, "entropy_coefficient": 0.01, "kl_estimator": "k3", "kl_coefficient": 0.1}
    of_batch = actor_loss(ActorLoss(**settings), "token-mean", None, [], False)
    counts = Denominators(float(batch.mask_T.sum()), float(len(EVERY)), 200.0)

    def packed(some: PackedBatch) -> dict[str, torch.Tensor]:
        lm = load_causal_lm(folder, torch.float32, False)
        of_batch(PackedPolicy(lm).train(), some, counts)[0].backward()
        return _gradients(lm)

    by_row = [row_logprobs(oracle, rows, row) for row in EVERY]
    apart = replace(batch, shared=None)
    of_batch(_Known(torch.cat([a for a, _ in by_row]), torch.cat([b for _, b in by_row])), apart, counts)[0].backward()
    expected = _gradients(oracle)
    found = packed(batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
    clipped_T = _clipped(batch, torch.from_numpy(now_T))
    sides = [clipped_T[shared.of_T == token].unique() for token in range(len(shared.first_U))]
    assert any(len(side) == 2 for side in sides)
    of_first_T = batch.each(batch.distinct(batch.columns["advantages"]))
    one_weight = packed(replace(batch, columns={**batch.columns, "advantages": of_first_T}))
    assert max(float((one_weight[name] - expected[name]).abs().max()) for name in expected) > 1e-3


class _Known(nn.Module):
    """A policy whose log-probs and entropies are known."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *_: Any) -> tuple[torch.Tensor, ...]:
        return self.outputs


def _clipped(batch: PackedBatch, logprobs_T: torch.Tensor) -> torch.Tensor:
    old_T, advantages_T = batch.columns["logprobs_old"], batch.columns["advantages"]
    inputs = PolicyLossInputs(logprobs_T, old_T, advantages_T, batch.mask_T, batch.offsets_B1, None)
    return policy_loss_named(LOSS["policy_loss"])(inputs, **LOSS["settings"]).metrics_T["clip_fraction"]


def _gradients(lm: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in lm.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def test_a_sibling_that_sees_a_sibling_would_show(folder_of: FolderOf) -> None:
    """Negative control: with the run as one sequence, branches read each other and other log-probs come of it.

    So does a branch that takes its prefix's keys from elsewhere in the run.
    """
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[1]), torch.float32, False)).eval()
    batch = pack(TREE, [0, 1, 2], CPU)
    shared, length = batch.layout.shared, len(batch.tokens_N)
    assert shared is not None
    right_T = policy(batch, 1.0)[0]
    whole = torch.tensor([0, length], dtype=torch.int32)
    joined = replace(batch.layout, cu_queries_S1=whole, cu_keys_S1=whole, max_queries=length, max_keys=length)
    joined = replace(joined, sequences=1, shared=None, slots_K=torch.arange(length))
    seen_T = policy(replace(batch, layout=joined), 1.0)[0]
    first, last = int(batch.offsets_B1[1]), int(batch.offsets_B1[2])
    torch.testing.assert_close(seen_T[:first], right_T[:first], rtol=1e-5, atol=1e-5)  # nothing lies before row 0
    assert (seen_T[last + 80 :] - right_T[last + 80 :]).abs().mean() > 0.1
    source_K = shared.source_K.clone()
    source_K[shared.copies_C] = shared.copied_C.flip(0)
    moved = replace(batch, layout=replace(batch.layout, shared=replace(shared, source_K=source_K)))
    assert (policy(moved, 1.0)[0] - right_T).abs().mean() > 0.1


def test_values_and_their_gradients_are_those_of_each_path_alone(folder_of: FolderOf) -> None:
    """The critic reads a shared state for each path; their errors add up. It starts at zero: its head is randomised."""
    folder = folder_of(SHAPES[0])
    critic, oracle = PackedCritic(load_causal_lm(folder, torch.float32, False)), load_unpacked(folder)
    torch.manual_seed(0)
    nn.init.normal_(critic.head.weight, std=0.1)
    batch = pack(TREE, EVERY, CPU)
    values_T = critic(batch)
    expected_T = torch.cat([row_values(oracle, critic.head, TREE, row) for row in EVERY])
    torch.testing.assert_close(values_T, expected_T, rtol=1e-5, atol=1e-5)
    (values_T - batch.columns["returns"]).square().mean().backward()
    (expected_T - batch.columns["returns"]).square().mean().backward()
    expected = _gradients(oracle.base_model)
    for name, gradient in _gradients(critic.backbone).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_kl_to_a_reference_is_that_of_each_token(folder_of: FolderOf) -> None:
    """Over the whole vocabulary: shared tokens take their reference's state. Control: 0 where both are the same."""
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[0]), torch.float32, False)).eval()
    other = PackedPolicy(load_causal_lm(folder_of(replace(SHAPES[0], intermediate=64)), torch.float32, False)).eval()
    batch = pack(TREE, EVERY, CPU)
    for of, least in ((other, 0.01), (policy, 0.0)):
        states_TH = of.hidden(batch)
        with_states = replace(batch, columns={**batch.columns, STATES: states_TH})
        kl_T = policy(batch, 1.0, reference_of(with_states, Head(of.head.weight)))[2]
        apart_T = policy(replace(batch, shared=None), 1.0, Reference(states_TH, of.head.weight))[2]
        torch.testing.assert_close(kl_T, apart_T, rtol=1e-5, atol=1e-6)
        assert kl_T.mean() > least if least else kl_T.abs().max() == 0
