"""After a reshard the rollout engine's weights are the actor's, and a stale or damaged copy could not go unnoticed.

The proof is by what both sides compute: vLLM's own log-probs of tokens it sampled, against the trainer's forward pass.
Real DeepSpeed, real vLLM, float32. Combinations are spread: every architecture, ZeRO stage and number of ranks meets
every property, not every other value. Actor and rollout in one group; in two: test_broadcast.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks, Shape

FolderOf = Callable[[Shape], Path]
EQUAL = 1e-5  # mean difference of log-probs in float32
STALE = 0.05  # far below what one step of `_step` does to them
ROLES = ("actor", "rollout")
# Large enough an MLP that DeepSpeed shards it: below 100,000 elements it keeps parameters whole.
SHARDED = 1024


def _gap(ranks: Ranks, tensor_parallel: int = 1) -> float:
    """Mean difference between vLLM's and the trainer's log-probs, on the worst rank."""
    prompts = [np.arange(3, 3 + length) for length in (1, 4, 7, 2)]
    engines = [rank // tensor_parallel for rank in range(ranks.count)]
    asked = [Ragged.of([(row + 5 * engine) % 61 + 3 for row in prompts], np.int32) for engine in engines]
    replies = ranks.ask_each(
        "rollout_logprobs",
        [{"prompts": rows.values_T, "offsets": rows.offsets_B1} for rows in asked],
        tokens=12,
    )
    for reply, engine in zip(replies, engines, strict=True):
        assert len(reply["vllm"]) == len(reply["trainer"]) == 4 * 12
        assert np.array_equal(reply["tokens"], replies[engine * tensor_parallel]["tokens"]), "an engine's ranks differ"
    return max(float(np.abs(reply["vllm"] - reply["trainer"]).mean()) for reply in replies)


def _spread(tensor_parallel: int) -> dict[str, Any]:
    return {**SMALL["rollout"], "tensor_parallel": tensor_parallel}


def _request(folder: Path) -> dict[str, Any]:
    prompts = Ragged.of([np.arange(4, 8), np.arange(9, 12)], np.int32)
    sampling = {"samples": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4, "ignore_eos": False}
    return {
        "prompts": prompts,
        "tokenizer": str(folder),
        "sampling": {**sampling, "seed": [0, 0, 0]},
    }


def _step(ranks: Ranks, folder: Path, version: int) -> None:
    """Train on random experience, hard enough to change every weight."""
    path = write_rows(folder / f"{version}.parquet", random_rows(8, seed=version))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)


def _wrong(ranks: Ranks) -> list[str]:
    return [name for reply in ranks.ask("mismatches") for name in reply["names"]]


def _errors(ranks: Ranks, version: int, look: str) -> list[str]:
    """What each rank says of a reshard whose weights are damaged on the last rank before `look` looks at them."""
    arguments = {"version": version}
    replies = ranks.ask("spoiled_refusal", arguments=arguments, look=look, rank=ranks.count - 1)
    return [reply["error"] for reply in replies]


@pytest.mark.parametrize(
    ("shape", "stage", "count"),
    [
        (Shape("qwen2", tied=True), 2, 1),
        (Shape("llama", tied=False), 0, 1),
        (Shape("qwen3", tied=False), 1, 1),
        (Shape("qwen2", tied=False), 2, 2),
        (Shape("llama", tied=True), 1, 2),
        (Shape("qwen3", tied=True), 0, 2),
        (Shape("phi3", tied=False), 2, 1),
    ],
    ids=lambda value: value.architecture if isinstance(value, Shape) else str(value),
)
def test_shared_weights_are_current_after_every_step_and_nothing_is_copied(
    shape: Shape, stage: int, count: int, folder_of: FolderOf, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every parameter of vLLM aliases the trainer's storage; the optimizer's step is the reshard, already before it."""
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    built = ranks.build(folder_of(shape), ROLES, actor={"zero_stage": stage})
    assert (built.strategy, built.parameters_copied) == ("shared", 0)
    assert built.parameters_shared == ranks.ask("mismatches")[0]["of"] > 0
    assert _gap(ranks) < EQUAL
    before, addresses = ranks.parameters(), ranks.ask("addresses", role="actor")
    for version in range(2):
        _step(ranks, tmp_path, version)
        assert _gap(ranks) < EQUAL
        replies = ranks.ask("reshard", version=version + 1)
        assert [reply.bytes for reply in replies] == [0] * count
        assert _wrong(ranks) == []
    assert ranks.ask("addresses", role="actor") == addresses
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in ranks.parameters().items())


def test_ranks_of_one_engine_copy_their_slices_of_what_they_hold(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Tensor parallel without communication: stale until the reshard, equal after it, and damage is refused.

    Rows of the embeddings lie in the trainer's buffer as vLLM needs them and are shared, as the norms are.
    """
    shape = Shape("qwen2", tied=False)
    built = two_ranks.build(folder_of(shape), ROLES, actor={"zero_stage": 2}, rollout=_spread(2))
    names, layers = two_ranks.ask("mismatches")[0]["of"], 2
    copied = 5 * layers  # qkv and its bias, o, gate_up, down
    assert (built.strategy, built.parameters_copied) == ("local", copied)
    assert built.parameters_shared == names - copied
    assert _gap(two_ranks, 2) < EQUAL
    for version in range(2):
        _step(two_ranks, tmp_path, version)
        assert _gap(two_ranks, 2) > STALE
        assert any("down_proj" in name for name in _wrong(two_ranks))
        replies = two_ranks.ask("reshard", version=version + 1)
        size = layers * (128 * (256 + 128 + 3 * 96) + 256) * 4 // 2
        assert [reply.bytes for reply in replies] == [size] * 2
        assert _wrong(two_ranks) == []
        assert _gap(two_ranks, 2) < EQUAL
    first, second = two_ranks.ask("generate", **_request(folder_of(shape)))
    assert (first.policy_version, sorted(first.positions_P.tolist()), second) == (2, [0, 1], None)
    errors = _errors(two_ranks, 3, "penstock.engines.weights.copies.differs")
    assert errors[0] == ""
    assert "1 rollout parameters are not the actor's: model.layers.0.self_attn.qkv_proj.weight" in errors[1]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_zero_3_gathers_its_shards_into_the_rollout_engine(
    tensor_parallel: int, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Nothing can be shared; after a step the rollout is stale by far until the reshard, and equal after it."""
    shape = Shape("qwen2" if tensor_parallel == 1 else "qwen3", tied=tensor_parallel == 2, intermediate=SHARDED)
    sections = {"actor": {"zero_stage": 3}, "rollout": _spread(tensor_parallel)}
    built = two_ranks.build(folder_of(shape), ROLES, **sections)
    assert built.strategy == "gather"
    assert (built.parameters_shared, built.parameters_copied) == (0, two_ranks.ask("mismatches")[0]["of"])
    assert any("mlp" in name for name in two_ranks.ask("shards", role="actor")[0]["names"])
    assert _gap(two_ranks, tensor_parallel) < EQUAL
    for version in range(2):
        _step(two_ranks, tmp_path, version)
        assert _gap(two_ranks, tensor_parallel) > STALE
        assert any("qkv_proj" in name for name in _wrong(two_ranks))
        moved = two_ranks.ask("reshard", version=version + 1)
        assert all(reply.bytes == 4 * built.parameters for reply in moved)
        assert _wrong(two_ranks) == []
        assert _gap(two_ranks, tensor_parallel) < EQUAL
    errors = _errors(two_ranks, 3, "penstock.engines.weights.gather.range_sums")
    assert (errors[0], "model.embed_tokens.weight" in errors[1]) == ("", True)
    if tensor_parallel == 2:
        errors = _errors(two_ranks, 3, "penstock.engines.weights.copies.differs")
        assert (errors[0], "model.embed_tokens.weight" in errors[1]) == ("", True)


def test_zero_3_on_one_rank_gathers_from_itself(one_rank: Ranks, folder_of: FolderOf) -> None:
    """A single rank holds whole parameters as its shards."""
    one_rank.build(folder_of(Shape("llama", tied=False, intermediate=SHARDED)), ROLES, actor={"zero_stage": 3})
    assert (_wrong(one_rank), _gap(one_rank) < EQUAL) == ([], True)


@pytest.mark.parametrize("numel", [1, 7, 8, 4097])
def test_parameters_that_do_not_divide_over_the_ranks_arrive_without_their_padding(
    numel: int, two_ranks: Ranks
) -> None:
    """The last shard is longer than what it holds, or holds nothing. Control: a shard that changed is told."""
    values = np.random.default_rng(numel).normal(size=numel).astype(np.float32)
    for reply in two_ranks.ask("gather_odd", values=values, damage=-1):
        assert np.array_equal(reply["values"], values)
        assert reply["wrong"] == []
    damage = [{"damage": 0}, {"damage": -1}]
    assert [reply["wrong"] for reply in two_ranks.ask_each("gather_odd", damage, values=values)] == [["odd"]] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_vllm_pads_is_copied_and_the_rest_shared(
    tied: bool, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """100 rows are 128 in vLLM: the embeddings go by copy, each reshard, and no more than they."""
    built = one_rank.build(folder_of(Shape("qwen3", tied=tied, vocabulary=100)), ROLES, actor={"zero_stage": 2})
    copied = 1 if tied else 2
    assert (built.strategy, built.parameters_copied) == ("shared", copied)
    assert built.parameters_shared == one_rank.ask("mismatches")[0]["of"] - copied > 0
    assert _gap(one_rank) < EQUAL
    _step(one_rank, tmp_path, 0)
    assert set(_wrong(one_rank)) == {"model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])}
    assert _gap(one_rank) > STALE
    assert one_rank.ask("reshard", version=1)[0].bytes == copied * 100 * 128 * 4
    assert _gap(one_rank) < EQUAL


def test_ranks_of_one_engine_take_apart_what_comes_stacked(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Each needs its rows of queries, keys, values, gate and up, which are several stretches of a whole matrix."""
    two_ranks.build(folder_of(Shape("phi3", tied=True)), ROLES, actor={"zero_stage": 2}, rollout=_spread(2))
    assert _gap(two_ranks, 2) < EQUAL
    _step(two_ranks, tmp_path, 0)
    assert _gap(two_ranks, 2) > STALE
    two_ranks.ask("reshard", version=1)
    assert (_wrong(two_ranks), _gap(two_ranks, 2) < EQUAL) == ([], True)


def test_a_model_whose_weights_could_not_all_be_compared_is_refused_when_it_is_built(
    one_rank: Ranks, folder_of: FolderOf
) -> None:
    """One message names family and parameters; also where vLLM makes other tensors of them. Control: it does not."""

    def building(shape: Shape) -> dict[str, Any]:
        one_rank.ask("discard")
        model = str(folder_of(shape))
        config = TrainConfig.model_validate({**SMALL, "model": {"path": model}}).model_dump(mode="json")
        return {"config": config, "folder": model, "roles": list(ROLES)}

    sound = Shape("qwen2", tied=True)
    error = one_rank.ask("refusal", of="build", arguments=building(Shape("apertus", tied=False)))[0]["error"]
    assert "ApertusForCausalLM has parameters without a known counterpart: 4 of vLLM's (model.layers.0.mlp" in error
    error = one_rank.ask("refusal_of_packed_weights", arguments=building(sound))[0]["error"]
    assert re.search(r"Qwen2ForCausalLM computes with \d+ tensors that vLLM makes of its parameters \(.*packed", error)
    one_rank.build(folder_of(sound), ROLES)
    assert _gap(one_rank) < EQUAL


def test_a_tied_head_that_the_files_hold_as_well_is_tied_in_vllm(one_rank: Ranks, tmp_path: Path) -> None:
    """As in Qwen3's smallest: vLLM would otherwise have a head of its own, which the trainer knows nothing of."""
    Shape("qwen3", tied=True).write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    built = one_rank.build(tmp_path, ROLES, actor={"zero_stage": 2})
    assert (built.parameters_copied, _wrong(one_rank), _gap(one_rank) < EQUAL) == (0, [], True)


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


def test_no_rollout_between_an_update_and_its_reshard(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Shared weights would be the next version's already, under the name of the last. Control: before and after."""
    folder = folder_of(Shape("qwen2", tied=True))
    one_rank.build(folder, ROLES, actor={"zero_stage": 2})
    request = _request(folder)
    assert one_rank.ask("generate", **request)[0].policy_version == 0
    _step(one_rank, tmp_path, 0)
    error = one_rank.ask("refusal", of="generate", arguments=request)[0]["error"]
    assert "a reshard comes first" in error
    one_rank.ask("reshard", version=1)
    assert one_rank.ask("generate", **request)[0].policy_version == 1
