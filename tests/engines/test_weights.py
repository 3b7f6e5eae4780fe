"""After a reshard the rollout engine's weights are the trainer's, and a stale copy could not go unnoticed.

The proof is by what both sides compute: vLLM's own log-probs of tokens it sampled, against the trainer's forward pass.
Real DeepSpeed, real vLLM, float32. Combinations are spread: every architecture, ZeRO stage and number of ranks meets
every property, not every other value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engines.weights import (
    FusedParameter,
    bind,
    flatten_in_place,
    fused_view,
    ordered_parameters,
    plan,
    verify,
    without_storage,
)
from state.experience import Ragged
from tests.engines.ranks import Ranks, Shape
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows

FolderOf = Callable[[Shape], Path]
EQUAL = 1e-5  # mean difference of log-probs in float32
STALE = 0.05  # far below what one step of `_step` does to them
ROLES = ("actor", "rollout")


# ---- plan, views, binding: on plain modules ------------------------------------------------------------------------


class Attention(nn.Module):
    """Hugging Face's side: three matrices, and a fourth that is not fused."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)
        self.o_proj = nn.Linear(8, 8, bias=False)


class Uninitialised(nn.Module):
    """A layer that leaves its parameters to a loader, as vLLM's do."""

    def __init__(self, rows: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 8))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows))


class FusedAttention(nn.Module):
    """vLLM's side."""

    def __init__(self, o_rows: int = 8) -> None:
        super().__init__()
        self.qkv_proj = Uninitialised(16, bias=True)
        self.o_proj = Uninitialised(o_rows, bias=False)


def _bound(share: bool = True, o_rows: int = 8) -> tuple[Attention, FusedAttention, Any]:
    ours = Attention()
    flatten_in_place(ordered_parameters(ours))
    with without_storage():
        theirs = FusedAttention(o_rows)
    return ours, theirs, bind(theirs, ours, share)


def test_the_plan_puts_fused_parts_together_and_drops_none() -> None:
    """Weights and biases fuse separately, in vLLM's row order; whatever is not fused keeps its place."""
    assert plan(name for name, _ in Attention().named_parameters()) == [
        FusedParameter("qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        FusedParameter("qkv_proj.bias", ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        FusedParameter("o_proj.weight", ("o_proj.weight",)),
    ]
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert [fused.name for fused in plan(names)] == ["model.layers.0.mlp.gate_up_proj.weight", "lm_head.weight"]
    assert plan(["q_proj.weight"]) == [FusedParameter("q_proj.weight", ("q_proj.weight",))]


def test_a_fused_view_exists_only_over_neighbours_in_order() -> None:
    """A view over anything else would be a matrix of the wrong rows."""
    flat = torch.arange(48.0)
    a, b, c = (flat[start : start + 16].view(2, 8) for start in (0, 16, 32))
    view = fused_view([a, b])
    assert view is not None
    assert torch.equal(view, torch.cat([a, b]))
    assert view.data_ptr() == a.data_ptr()
    assert fused_view([b, a]) is None
    assert fused_view([a, c]) is None
    assert fused_view([a, b.clone()]) is None
    assert fused_view([a, flat[16:32].view(4, 4)]) is None
    assert fused_view([a, b.t()]) is None


def test_flattening_moves_parameters_and_keeps_their_values() -> None:
    """One buffer in the order given; writing through it reaches the module."""
    module = Attention()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = flatten_in_place(ordered_parameters(module))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert flat.numel() == sum(parameter.numel() for parameter in module.parameters())
    flat.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_binding_shares_storage_and_allocates_none_before() -> None:
    """What the trainer writes is there at once; without a flat buffer the same parts can only be copied."""
    ours, theirs, sharing = _bound()
    assert (len(sharing.shared), sharing.copied_count) == (3, 0)
    with torch.no_grad():
        ours.k_proj.weight.fill_(3.0)
    assert torch.equal(theirs.qkv_proj.weight[8:12], torch.full((4, 8), 3.0))
    assert verify(theirs, ours, sharing) == []
    with without_storage():
        stub = FusedAttention()
    assert stub.qkv_proj.weight.untyped_storage().nbytes() == 4
    assert nn.Linear(8, 8).weight.untyped_storage().nbytes() == 256  # only within the context
    apart = bind(stub, Attention(), share=True)  # parameters in storages of their own
    assert [fused.name for fused in apart.copied] == ["qkv_proj.weight", "qkv_proj.bias"]


def test_what_does_not_fit_is_copied_and_the_rest_still_shared() -> None:
    """Rows that vLLM adds (a padded vocabulary) or another dtype must never be bound over."""
    _, theirs, sharing = _bound(o_rows=9)
    assert [fused.name for fused in sharing.copied] == ["o_proj.weight"]
    assert theirs.o_proj.weight.shape == (9, 8)
    ours = Attention()
    flatten_in_place(ordered_parameters(ours))
    other = bind(FusedAttention().double(), ours, share=True)
    assert (len(other.shared), other.copied_count) == (0, 3)


def test_verify_names_a_moved_address_and_another_value() -> None:
    """The two ways in which a rollout goes stale: shared storage that moved, and a copy that was not made."""
    ours, theirs, sharing = _bound()
    ours.k_proj.bias.data = ours.k_proj.bias.data.clone()  # not the first part: still read through the old storage
    ours.q_proj.weight.data = ours.q_proj.weight.data.clone()
    assert "qkv_proj.weight" in verify(theirs, ours, sharing)
    assert "qkv_proj.bias" in verify(theirs, ours, sharing)
    ours, theirs, sharing = _bound(share=False)
    with torch.no_grad():
        theirs.qkv_proj.weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.qkv_proj.bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
        theirs.o_proj.weight.copy_(ours.o_proj.weight)
        assert verify(theirs, ours, sharing) == []
        ours.v_proj.weight[3, 7] += 1e-6
    assert verify(theirs, ours, sharing) == ["qkv_proj.weight"]


# ---- the real engines ----------------------------------------------------------------------------------------------


def _gap(ranks: Ranks) -> float:
    """Mean difference between vLLM's and the trainer's log-probs, on the worst rank."""
    prompts = [np.arange(3, 3 + length) for length in (1, 4, 7, 2)]
    asked = [Ragged.of([(row + 5 * rank) % 61 + 3 for row in prompts], np.int32) for rank in range(ranks.count)]
    replies = ranks.ask_each(
        "rollout_logprobs",
        [{"prompts": rows.values_T, "offsets": rows.offsets_B1} for rows in asked],
        tokens=12,
    )
    for reply in replies:
        assert len(reply["vllm"]) == len(reply["trainer"]) == 4 * 12
    return max(float(np.abs(reply["vllm"] - reply["trainer"]).mean()) for reply in replies)


def _step(ranks: Ranks, folder: Path, version: int) -> None:
    """Train on random experience, hard enough to change every weight."""
    path = write_rows(folder / f"{version}.parquet", random_rows(8, seed=version))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)


def _wrong(ranks: Ranks) -> list[str]:
    return [name for reply in ranks.ask("mismatches") for name in reply["names"]]


@pytest.mark.parametrize(
    ("shape", "stage", "count"),
    [
        (Shape("qwen2", tied=True), 2, 1),
        (Shape("llama", tied=False), 0, 1),
        (Shape("qwen3", tied=False), 1, 1),
        (Shape("qwen2", tied=False), 2, 2),
        (Shape("llama", tied=True), 1, 2),
        (Shape("qwen3", tied=True), 0, 2),
    ],
    ids=lambda value: value.architecture if isinstance(value, Shape) else str(value),
)
def test_shared_weights_are_current_after_every_step_and_nothing_is_copied(
    shape: Shape, stage: int, count: int, folder_of: FolderOf, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every parameter of vLLM aliases the trainer's storage; the optimizer's step is the reshard, already before it."""
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    built = ranks.build(folder_of(shape), ROLES, actor={"zero_stage": stage})
    assert built["parameters_copied"] == 0
    assert built["parameters_shared"] == ranks.ask("mismatches")[0]["of"] > 0
    assert _gap(ranks) < EQUAL
    before, addresses = ranks.parameters(), ranks.ask("addresses", role="actor")
    for version in range(2):
        _step(ranks, tmp_path, version)
        assert _gap(ranks) < EQUAL
        replies = ranks.ask("reshard", version=version + 1)
        assert [reply["bytes"] for reply in replies] == [0] * count
        assert _wrong(ranks) == []
    assert ranks.ask("addresses", role="actor") == addresses
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in ranks.parameters().items())


@pytest.mark.parametrize("count", [1, 2])
def test_zero_3_gathers_its_shards_into_the_rollout_engine(
    count: int, folder_of: FolderOf, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Nothing can be shared; after a step the rollout is stale by far until the reshard, and equal after it."""
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    # Large enough an MLP that DeepSpeed shards it: below 100,000 elements it keeps parameters whole.
    shape = Shape("qwen3" if count == 1 else "qwen2", tied=count == 1, intermediate=1024)
    built = ranks.build(folder_of(shape), ROLES, actor={"zero_stage": 3})
    assert (built["parameters_shared"], built["parameters_copied"]) == (0, ranks.ask("mismatches")[0]["of"])
    assert any("mlp" in name for name in ranks.ask("shards", role="actor")[0]["names"])
    assert _gap(ranks) < EQUAL
    for version in range(2):
        _step(ranks, tmp_path, version)
        assert _gap(ranks) > STALE
        assert any("qkv_proj" in name for name in _wrong(ranks))
        moved = ranks.ask("reshard", version=version + 1)
        assert all(reply["bytes"] == 4 * built["parameters"] for reply in moved)
        assert _wrong(ranks) == []
        assert _gap(ranks) < EQUAL


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_vllm_pads_is_copied_and_the_rest_shared(
    tied: bool, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """100 rows are 128 in vLLM: the embeddings go by copy, each reshard, and no more than they."""
    built = one_rank.build(folder_of(Shape("qwen3", tied=tied, vocabulary=100)), ROLES, actor={"zero_stage": 2})
    copied = 1 if tied else 2
    assert built["parameters_copied"] == copied
    assert built["parameters_shared"] == one_rank.ask("mismatches")[0]["of"] - copied > 0
    assert _gap(one_rank) < EQUAL
    _step(one_rank, tmp_path, 0)
    assert set(_wrong(one_rank)) == {"model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])}
    assert _gap(one_rank) > STALE
    assert one_rank.ask("reshard", version=1)[0]["bytes"] == copied * 100 * 128 * 4
    assert _gap(one_rank) < EQUAL


def test_a_stale_copy_is_seen_in_the_log_probs_and_named(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Negative control for every test above: weights of its own, and no copy after the step."""
    folder = folder_of(Shape("qwen2", tied=True))
    one_rank.build(folder, ROLES, actor={"zero_stage": 2})
    total = one_rank.ask("mismatches")[0]["of"]
    assert one_rank.ask("bind_without_sharing", folder=str(folder))[0]["copied"] == total
    assert (_wrong(one_rank), _gap(one_rank) < EQUAL) == ([], True)
    _step(one_rank, tmp_path, 0)
    assert len(_wrong(one_rank)) == total
    assert _gap(one_rank) > STALE
    one_rank.ask("reshard", version=1)
    assert (_wrong(one_rank), _gap(one_rank) < EQUAL) == ([], True)
