"""Engines with adapters: DeepSpeed trains them alone, vLLM generates with them merged, and neither can be stale unseen.

As in the tests of full weights (weights/test_reshard.py, test_trainer.py) the proof is by what both sides compute.
The mathematics of an adapter: test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from penstock.configs.sections.trainer import LoraConfig, SftConfig
from penstock.engines.batches.packing import Rows
from penstock.engines.families.shape import read_settings
from penstock.engines.families.table import family_of
from penstock.engines.models.model_folder import with_adapters
from penstock.engines.training.state_images import read_causal_lm_weights, saved_actor
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import SMALL, Ranks, Shape
from tests.engines.training.test_preference import MARGINS, SCORES, pairs, write
from tests.engines.unpacked import load_unpacked, row_logprobs, row_tokens

FolderOf = Callable[[Shape], Path]
EQUAL, STALE = 1e-5, 0.05  # mean difference of log-probs in float32
ROLES = ("actor", "rollout")
LORA = {"rank": 4, "alpha": 8.0}
ATTENTION = {**LORA, "targets": ["q_proj", "v_proj"]}
SHAPE = Shape("qwen2", tied=True)
PROMPTS = Ragged.of([np.arange(3, 3 + length) for length in (1, 4, 7, 2)], np.int32)


def _gap(ranks: Ranks) -> float:
    """Mean difference between vLLM's and the trainer's log-probs of what vLLM sampled, on the worst rank."""
    replies = ranks.ask("rollout_logprobs", prompts=PROMPTS.values_T, offsets=PROMPTS.offsets_B1, tokens=12)
    return max(float(np.abs(reply["vllm"] - reply["trainer"]).mean()) for reply in replies)


def _step(ranks: Ranks, folder: Path, version: int, command: str = "update_actor") -> None:
    """Train hard enough to change what the model says: B starts at zero, so the first step moves B alone."""
    path = write_rows(folder / f"{version}.parquet", random_rows(8, seed=abs(version)))
    split = {**SPLIT, "mini_batches": 4, "micro_batch_tokens": 32}
    ranks.ask(command, path=path, version=version, split=split, loss=LOSS, learning_rate=3e-2)


def _wrong(ranks: Ranks) -> list[str]:
    return [name for reply in ranks.ask("mismatches") for name in reply["names"]]


def _adapters(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in parameters.items() if "lora_" in name}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("shape", "lora", "stage", "count", "parallel", "copied"),
    [
        (SHAPE, LORA, 2, 1, 1, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        (Shape("llama", tied=False), ATTENTION, 0, 2, 1, ["qkv_proj"]),
        (Shape("qwen3", tied=True), LORA, 1, 2, 2, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    ],
    ids=["all layers", "attention on two ranks", "one engine of two ranks"],
)
def test_merged_weights_reach_the_rollout_engine_and_the_base_never_changes(
    shape: Shape,
    lora: dict[str, Any],
    stage: int,
    count: int,
    parallel: int,
    copied: list[str],
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Stale after a step, equal after the reshard, damage refused; only matrices with adapters are copied."""
    ranks = ranks_of(count)
    rollout = {**SMALL["rollout"], "tensor_parallel": parallel}
    built = ranks.build(folder_of(shape), ROLES, actor={"zero_stage": stage, "lora": lora}, rollout=rollout)
    before = ranks.parameters()
    assert built.strategy == ("shared" if parallel == 1 else "local")
    assert built.parameters_copied == 2 * len(copied)
    assert built.trained == sum(value.numel() for value in _adapters(before).values()) < built.parameters
    assert _gap(ranks) < EQUAL
    for version in range(2):
        _step(ranks, tmp_path, version)
        assert _gap(ranks) > STALE
        assert {name.split(".")[-2] for name in _wrong(ranks)} == set(copied)
        written = {reply.bytes for reply in ranks.ask("reshard", version=version + 1)}
        sizes = {"qkv_proj": 256 * 128, "o_proj": 128 * 128, "gate_up_proj": 192 * 128, "down_proj": 96 * 128}
        assert written == {2 * sum(sizes[name] for name in copied) * 4 // parallel}
        assert _wrong(ranks) == []
        assert _gap(ranks) < EQUAL
    after = ranks.parameters()
    assert {name for name in before if not torch.equal(after[name], before[name])} == set(_adapters(before))
    arguments = {"version": 3}
    look = "penstock.engines.weights.copies.differs"
    errors = [reply["error"] for reply in ranks.ask("spoiled_refusal", arguments=arguments, look=look, rank=count - 1)]
    assert errors[:-1] == [""] * (count - 1)
    assert "1 rollout parameters are not the actor's: model.layers.0.self_attn.qkv_proj.weight" in errors[-1]


@pytest.mark.parametrize(("count", "stage"), [(1, 0), (2, 2)])
def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_bit_for_bit(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """In a new model of the same folder; and the model that is exported is the one made of folder and checkpoint.

    Controls: a model without the restore, and one with the adapters but not the optimizer's state, end elsewhere.
    """
    ranks, saved, folder = ranks_of(count), tmp_path / "checkpoint", folder_of(SHAPE)
    saved.mkdir()
    sections = {"actor": {"zero_stage": stage, "lora": LORA}}
    ranks.build(folder, ROLES, **sections)
    _step(ranks, tmp_path, 0)
    ranks.ask("reshard", version=1)
    ranks.ask("save", folder=str(saved))
    at_save = ranks.parameters()
    ranks.ask("export", folder=str(tmp_path / "exported"))
    held = read_causal_lm_weights(saved_actor(saved))
    assert _same({f"lm.{name}": value for name, value in held.items()}, _adapters(at_save))
    _step(ranks, tmp_path, 1)
    wanted = ranks.parameters()

    ranks.build(folder, ROLES, **sections)
    assert not _same(ranks.parameters(), at_save)
    ranks.ask("load", folder=str(saved), version=1)
    assert _same(ranks.parameters(), at_save)
    assert _gap(ranks) < EQUAL  # a resumed rollout engine has the adapters, too
    _step(ranks, tmp_path, 1)
    assert _same(ranks.parameters(), wanted)

    base_sum = saved_actor(saved).frozen_sum
    merged = with_adapters(folder, held, LoraConfig(**LORA), base_sum, tmp_path / "adapter").state_dict()
    exported = load_unpacked(tmp_path / "exported").state_dict()
    assert _same(exported, dict(merged))
    assert not _same(exported, load_unpacked(folder).state_dict())
    ours, theirs = (tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "exported/adapter"))
    assert _same(load_file(ours), load_file(theirs))

    other = load_unpacked(folder)
    other.model.norm.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    ranks.build(tmp_path / "other", **sections)
    error = ranks.ask("refusal", of="load", arguments={"folder": str(saved), "version": 1})[0]["error"]
    assert "trained beside other weights" in error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen 3 MoE", pytest.param("gpt-oss", marks=pytest.mark.exhaustive)])
def test_adapters_on_experts_reach_vllm_and_go_on_bit_for_bit(name: str, one_rank: Ranks, tmp_path: Path) -> None:
    """Stale after a step, equal after the reshard and after a restore; experts themselves never change.

    Controls: a new model without the restore; and without the option a step moves linear layers' adapters alone, from
    the same start, and vLLM's experts are the trainer's own memory.
    """
    folder, saved = write_family(name, tmp_path / "model"), tmp_path / "checkpoint"
    saved.mkdir()
    lora = {"rank": 8, "alpha": 16.0}

    def build(experts: bool) -> tuple[dict[str, torch.Tensor], int]:
        built = one_rank.build(folder, ROLES, actor={"zero_stage": 1, "lora": {**lora, "experts": experts}})
        return one_rank.parameters(), built.parameters_copied

    without, copied = build(experts=False)
    started, more = build(experts=True)
    assert all(torch.equal(value, started[key]) for key, value in without.items())
    both = 2 * len(family_of(read_settings(folder)["model_type"]).transposed)  # copied in any case
    assert more == copied + 2 * 2 - both
    assert all(".experts." in key for key in started.keys() - without.keys())
    assert _gap(one_rank) < EQUAL
    _step(one_rank, tmp_path, 0)
    assert _gap(one_rank) > STALE
    one_rank.ask("reshard", version=1)
    assert _wrong(one_rank) == [] and _gap(one_rank) < EQUAL
    one_rank.ask("save", folder=str(saved))
    one_rank.ask("export", folder=str(tmp_path / "exported"))
    at_save = one_rank.parameters()
    assert {key for key in started if not torch.equal(at_save[key], started[key])} <= set(_adapters(started))
    held = [key for key in _adapters(started) if ".experts." in key and key.endswith("lora_B")]
    assert len(held) == 4 and all(at_save[key].any() for key in held)
    _step(one_rank, tmp_path, 1)
    wanted = one_rank.parameters()
    assert any(not torch.equal(wanted[key], at_save[key]) for key in held)

    assert not _same(build(experts=True)[0], at_save)
    one_rank.ask("load", folder=str(saved), version=1)
    assert _same(one_rank.parameters(), at_save) and _gap(one_rank) < EQUAL
    _step(one_rank, tmp_path, 1)
    assert _same(one_rank.parameters(), wanted)
    weights, config = read_causal_lm_weights(saved_actor(saved)), LoraConfig(**lora, experts=True)
    merged = with_adapters(folder, weights, config, saved_actor(saved).frozen_sum, tmp_path / "adapter").state_dict()
    assert _same(load_unpacked(tmp_path / "exported", attention="eager").state_dict(), dict(merged))
    ours, theirs = (tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "exported/adapter"))
    assert _same(load_file(ours), load_file(theirs))


@pytest.mark.parametrize(("count", "stage"), [(2, 1), (1, 2)])
def test_in_bfloat16_adapters_train_alone_and_are_restored_bit_for_bit(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """As on a GPU, where stage 1 is another optimizer of DeepSpeed than stage 2; moments are the adapters' alone."""
    ranks, saved = ranks_of(count), tmp_path / "checkpoint"
    saved.mkdir()
    sections: dict[str, Any] = {"actor": {"zero_stage": stage, "lora": LORA}, "model": {"dtype": "bfloat16"}}
    built = ranks.build(folder_of(SHAPE), ("actor",), **sections)
    before = ranks.parameters()
    _step(ranks, tmp_path, -1)
    held = [reply["elements"] for reply in ranks.ask("moments", role="actor")]
    assert held == [pytest.approx(built.trained / count, abs=8)] * count
    after = ranks.parameters()
    assert {name for name in before if not torch.equal(after[name], before[name])} == set(_adapters(before))
    ranks.ask("save", folder=str(saved))
    _step(ranks, tmp_path, -1)
    wanted = ranks.parameters()
    assert not _same(wanted, after)
    ranks.build(folder_of(SHAPE), ("actor",), **sections)
    ranks.ask("load", folder=str(saved), version=-1)
    assert _same(ranks.parameters(), after)
    _step(ranks, tmp_path, -1)
    assert _same(ranks.parameters(), wanted)


def test_the_reference_is_the_actor_without_its_adapters(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Before the first step the KL is exactly 0; after it the reference still is the base, to the last bit.

    Controls: the actor is not; and in a group without the actor the reference is a model, with the same log-probs.
    """
    folder, rows = folder_of(SHAPE), random_rows(8)
    path = write_rows(tmp_path / "rows.parquet", rows)

    def logprobs(role: str) -> np.ndarray:
        asked = {"path": path, "role": role, "temperature": 0.7, "budget": 60}
        return gathered(rows, two_ranks.ask("logprobs", **asked))

    sections = {"actor": {"lora": LORA}, "algorithm": {"kl": {}}}
    two_ranks.build(folder, ("actor",))
    base_T = logprobs("actor")
    two_ranks.build(folder, ("reference",), **sections)
    assert np.array_equal(logprobs("reference"), base_T)
    two_ranks.build(folder, ("actor", "reference"), **sections)
    assert np.array_equal(logprobs("actor"), base_T)
    assert np.array_equal(logprobs("reference"), base_T)
    two_ranks.ask("update_actor", path=path, version=-1, split=SPLIT, loss=LOSS, learning_rate=3e-2)
    assert np.abs(logprobs("actor") - base_T).mean() > STALE
    assert np.array_equal(logprobs("reference"), base_T)
    assert np.abs(logprobs("actor") - base_T).mean() > STALE  # and the adapters are in force again


def test_a_critic_trains_its_adapters_and_its_head(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """The actor beside it is not touched, and a checkpoint brings all of it back.

    Head and B start at zero, so that the first step moves the head alone, the second B, the third A.
    """
    rows = random_rows(8)
    path = write_rows(tmp_path / "rows.parquet", with_columns(rows, {"values": rows.columns["returns"].values_T}))
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    one_rank.build(folder_of(SHAPE), ("actor", "critic"), algorithm={"name": "ppo"}, critic={"lora": ATTENTION})
    actor, before = one_rank.parameters(), one_rank.parameters("critic")

    def update() -> None:
        one_rank.ask("update_critic", path=path, split={**SPLIT, "epochs": 3}, clip=None, learning_rate=1e-2)

    update()
    after = one_rank.parameters("critic")
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {*_adapters(before), "head.weight", "head.bias"}
    assert _same(one_rank.parameters(), actor)
    one_rank.ask("save", folder=str(saved))
    update()
    assert not _same(one_rank.parameters("critic"), after)
    one_rank.ask("load", folder=str(saved), version=0)
    assert _same(one_rank.parameters("critic"), after)


def test_supervised_training_with_adapters_writes_the_merged_model(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """The folder's own log-probs, whole rows at a time, give the next step's loss; what has no adapter is unchanged."""
    rows = random_rows(6)
    path, config = write_rows(tmp_path / "rows.parquet", rows), SftConfig(lora=LoraConfig(**ATTENTION), steps=4)
    two_ranks.ask("discard")
    trainer = config.model_dump(mode="json")
    model = {"trainer": trainer, "folder": str(folder_of(SHAPE)), "dtype": "float32", "seed": 0}
    two_ranks.ask("sft_begin", rows=path, model=model)
    every = np.arange(6)[None].repeat(3, 0)
    stepped = two_ranks.ask("sft_steps", batches=every, budget=40, learning_rate=3e-2)[0]
    losses = [step["loss"] for step in stepped.steps]
    assert losses[2] < losses[0] - 0.1
    two_ranks.ask("sft_end", folder=str(tmp_path / "trained"))
    trained, start = load_unpacked(tmp_path / "trained"), load_unpacked(folder_of(SHAPE)).state_dict()
    logprobs_T = torch.cat([row_logprobs(trained, rows, row)[0] for row in range(6)])
    assert -logprobs_T[torch.from_numpy(rows.mask.values_T > 0)].mean().item() < losses[2]
    changed = {name for name, value in trained.state_dict().items() if not torch.equal(value, start[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_the_seed_decides_where_adapters_start(kind: str, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """In supervised training and in that on preferences. Control: the same seed gives the same start."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(6))
    own = {"rows": path} if kind == "sft" else {"scores": False}
    starts = []
    for seed in (0, 1, 1):
        one_rank.ask("discard")
        model = {"folder": str(folder_of(SHAPE)), "dtype": "float32", "seed": seed}
        one_rank.ask(f"{kind}_begin", model={**model, "trainer": {"steps": 6, "lora": ATTENTION}}, **own)
        starts.append(one_rank.parameters(kind))
    assert not _same(starts[0], starts[1])
    assert _same(starts[1], starts[2])


def test_a_reward_model_trains_its_adapters_and_its_head(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """What is written scores as what was trained; an adapter without the head would be no reward model."""
    path = write(tmp_path / "pairs.parquet", pairs(), margin=np.concatenate([MARGINS, MARGINS]))
    one_rank.ask("discard")
    model = {"folder": str(folder_of(SHAPE)), "dtype": "float32", "seed": 0}
    one_rank.ask("preference_begin", model={**model, "trainer": {"steps": 6, "lora": ATTENTION}}, scores=True)
    steps = {"path": path, "batches": np.arange(5)[None].repeat(6, 0), "budget": 40, "loss": SCORES}
    losses = [step["loss"] for step in one_rank.ask("preference_steps", **steps, learning_rate=3e-2)[0].steps]
    assert losses[-1] < losses[0] - 0.1
    measured = one_rank.ask("preference_measure", path=path, budget=40, loss=SCORES)[0]
    one_rank.ask("preference_end", folder=str(tmp_path / "model"))
    assert not (tmp_path / "model" / "adapter").exists()
    model, rows = load_unpacked(tmp_path / "model", AutoModelForSequenceClassification), pairs()
    with torch.no_grad():
        scores = torch.stack([model(input_ids=row_tokens(rows, row)[0]).logits[0, 0] for row in range(len(rows))])
    assert measured["margin"] == pytest.approx(float((scores[0::2] - scores[1::2]).mean()), abs=1e-5)
    start = load_unpacked(folder_of(SHAPE)).state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start.get(name, value + 1))}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "score"}


def test_a_few_iterations_with_adapters_earn_more(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """The whole circle: vLLM answers with merged weights, the reward is the share of low tokens, the adapters learn."""
    rollout = {**SMALL["rollout"], "prompts": 4, "samples": 8}
    one_rank.build(folder_of(SHAPE), ROLES, actor={"lora": LORA}, rollout=rollout)
    sampling = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6, "ignore_eos": True}
    rewards = []
    for version in range(12):
        asked = {"prompts": PROMPTS, "tokenizer": str(folder_of(SHAPE))}
        reply = one_rank.ask("generate", **asked, sampling={**sampling, "seed": [0, version, 0]})[0]
        responses = reply.responses
        reward_B = np.array([(responses.row(row) < 32).mean() for row in range(len(responses))])
        rewards.append(reward_B.mean())
        advantages_T = np.repeat(reward_B - reward_B.mean(), 6).astype(np.float32)
        mask = Ragged(np.ones(len(advantages_T), np.uint8), responses.offsets_B1)
        columns = {"advantages": Ragged(advantages_T, responses.offsets_B1)}
        rows = Rows(PROMPTS.take(reply.positions_P.repeat(8)), responses, mask, columns)
        path = write_rows(tmp_path / f"{version}.parquet", rows)
        split = {**SPLIT, "samples": 8, "together": 8}
        one_rank.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)
        one_rank.ask("reshard", version=version + 1)
    assert rewards[0] < 0.65
    assert np.mean(rewards[-2:]) > 0.9
