"""One optimizer step of every ZeRO stage is torch's own step, and a restored trainer goes on as if never stopped.

The oracle is `tests.engines.unpacked`: plain cross-entropy row by row, torch's gradient clipping, torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.configs.sections.trainer import SftConfig
from penstock.engines.batches.packing import Rows
from penstock.engines.training.state_images import read_causal_lm_weights, saved_actor
from tests.engines.rows import LOSS, SPLIT, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import STEADY, PlainStep, load_unpacked, plain_steps, row_logprobs

SHAPE = Shape("qwen3", tied=True)
BIG = Shape("qwen3", tied=True, intermediate=1024)  # DeepSpeed shards nothing below 100,000 elements at stage 3
STEPS = [[0, 1, 2, 3, 4], [5, 6, 7], [2, 4, 6], [0, 1, 5]]  # rows of each optimizer step
PEAK = 0.2
RATES = [PEAK / 2, PEAK, PEAK, PEAK / 2]  # two steps of warm-up, then linear to 0 at the fourth
CLIP = 0.5
EVERY_STAGE = [(count, stage) for count in (1, 2) for stage in (0, 1, 2, 3)]
FolderOf = Callable[[Shape], Path]


def _begin(ranks: Ranks, folder: Path, path: str, stage: int, dtype: str = "float32") -> None:
    optimizer = {**STEADY, "max_grad_norm": CLIP, "warmup_steps": 2, "decay": "linear"}
    config = SftConfig(zero_stage=stage, steps=len(STEPS), optimizer=optimizer)
    ranks.ask("discard")
    model = {"trainer": config.model_dump(mode="json"), "folder": str(folder), "dtype": dtype, "seed": 0}
    ranks.ask("sft_begin", model=model, rows=path)


def _plain(folder: Path, rows: Rows) -> tuple[list[PlainStep], dict[str, torch.Tensor]]:
    """All steps of the plain loop; observations do not count."""
    lm = load_unpacked(folder)
    steps = []
    for index, rate in zip(STEPS, RATES, strict=True):

        def loss(index: list[int] = index) -> torch.Tensor:
            counted_T = torch.from_numpy(rows.mask.take(np.asarray(index)).values_T > 0)
            return -torch.cat([row_logprobs(lm, rows, row)[0] for row in index])[counted_T].mean()

        steps.append((loss, rate))
    taken = plain_steps(list(lm.parameters()), [loss for loss, _ in steps], [rate for _, rate in steps], CLIP)
    return taken, {name: parameter.detach() for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize(("count", "stage"), EVERY_STAGE)
def test_losses_norms_clipping_and_rates_are_torchs_own_at_every_zero_stage(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Four supervised steps: what is reported at each, and the weights at the end, as the exported folder has them.

    Nothing of DeepSpeed's stays in the process then, which trains on with another model.
    """
    ranks, rows = ranks_of(count), random_rows(8)
    expected, after = _plain(folder_of(SHAPE), rows)
    assert min(step.grad_norm for step in expected) > CLIP  # the norm that is reported is the one before clipping
    _begin(ranks, folder_of(SHAPE), write_rows(tmp_path / "rows.parquet", rows), stage)
    for number, (index, step, rate) in enumerate(zip(STEPS, expected, RATES, strict=True), start=1):
        reply = ranks.ask("sft_steps", batches=np.array([index]), budget=40, learning_rate=PEAK)[0]
        (figures,) = reply.steps
        assert figures["loss"] == pytest.approx(step.loss, abs=1e-5)
        assert figures["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5)
        assert ranks.ask("learning_rate", role="sft")[0] == {"steps": number, "rate": pytest.approx(rate)}
    held = [one["engines"] for one in ranks.ask("engines_held")]
    ranks.ask("sft_end", folder=str(tmp_path / "trained"))
    assert [one["engines"] for one in ranks.ask("engines_held")] == [number - 1 for number in held]
    assert len({path.stat().st_mode for path in (tmp_path / "trained").iterdir()}) == 1  # whoever reads one reads all
    trained = dict(load_unpacked(tmp_path / "trained").named_parameters())
    start = load_unpacked(folder_of(SHAPE)).state_dict()
    assert trained.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(trained[name].detach(), value, rtol=0, atol=1e-5)
    assert max(float((value - start[name]).abs().max()) for name, value in after.items()) > 1e-3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimizers_state_is_shared_out_from_stage_1_on(
    stage: int, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Half of AdamW's moments on each of two ranks is the memory that ZeRO promises, and the estimate counts on."""
    built = two_ranks.build(folder_of(BIG), actor={"zero_stage": stage})
    _update(two_ranks, write_rows(tmp_path / "rows.parquet", random_rows(4)))
    shares = [reply["elements"] / built.parameters for reply in two_ranks.ask("moments", role="actor")]
    assert shares == pytest.approx([1.0, 1.0] if stage == 0 else [0.5, 0.5], abs=1e-3)
    assert bool(two_ranks.ask("shards", role="actor")[0]["names"]) == (stage == 3)


BESIDE = ((1, 2), (2, 1))  # what other ways of the same test guard as well


def _update(ranks: Ranks, path: str, version: int = -1) -> None:
    split = {**SPLIT, "micro_batch_tokens": 64}
    ranks.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)


@pytest.mark.parametrize(
    ("count", "stage"), [(1, 0), (2, 2), (2, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in BESIDE)]
)
def test_a_restored_trainer_takes_the_same_next_step_bit_for_bit(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Weights, moments and step count come back, in this process and in a new model; storage stays where it was.

    Controls: without the restore the same experience leads elsewhere, and so it does with the weights alone.
    """
    ranks, saved = ranks_of(count), tmp_path / "checkpoint"
    folder, roles, sections = folder_of(BIG), ("actor", "rollout"), {"actor": {"zero_stage": stage}}
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    saved.mkdir()
    ranks.build(folder, roles, **sections)
    addresses = ranks.ask("addresses", role="actor")
    _update(ranks, path, version=0)
    ranks.ask("reshard", version=1)
    ranks.ask("save", folder=str(saved))
    numbers = ranks.ask("random_numbers")
    at_save = ranks.parameters()
    exported = {f"lm.{name}": value for name, value in read_causal_lm_weights(saved_actor(saved)).items()}
    assert _same(at_save, exported)  # what `penstock export` reads of it, without an engine
    _update(ranks, path, version=1)
    wanted = ranks.parameters()
    assert not _same(at_save, wanted)
    _update(ranks, path, version=1)
    assert not _same(ranks.parameters(), wanted)

    ranks.ask("load", folder=str(saved), version=1)
    assert _same(ranks.parameters(), at_save)
    assert ranks.ask("random_numbers") == numbers
    assert all(reply["names"] == [] for reply in ranks.ask("mismatches"))
    if stage < 3:  # at stage 3 only shards have addresses
        assert ranks.ask("addresses", role="actor") == addresses
    _update(ranks, path, version=1)
    assert _same(ranks.parameters(), wanted)

    ranks.build(folder, roles, **sections)
    ranks.ask("load", folder=str(saved), version=1)
    assert all(reply["names"] == [] for reply in ranks.ask("mismatches"))
    assert ranks.ask("learning_rate", role="actor")[0]["steps"] == 1
    _update(ranks, path, version=1)
    assert _same(ranks.parameters(), wanted)

    ranks.ask("load", folder=str(saved), version=1)
    ranks.ask("export", folder=str(tmp_path / "weights-alone"))
    ranks.build(tmp_path / "weights-alone", roles, **sections)
    assert _same(ranks.parameters(), at_save)
    _update(ranks, path, version=0)
    assert not _same(ranks.parameters(), wanted)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("count", [1, 2])
def test_in_bfloat16_stage_1_trains_as_stage_2_and_is_restored_bit_for_bit(
    count: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """There DeepSpeed takes an optimizer of its own, the one that GPUs train with; rounding is all that may differ.

    Control: without the restore the same experience leads elsewhere.
    """
    ranks, saved = ranks_of(count), tmp_path / "checkpoint"
    path = write_rows(tmp_path / "rows.parquet", random_rows(8, samples=2))
    saved.mkdir()
    ends = {}
    for stage in (2, 1):
        ranks.build(folder_of(BIG), actor={"zero_stage": stage}, model={"dtype": "bfloat16"})
        start = ranks.parameters()
        _update(ranks, path)
        ends[stage] = ranks.parameters()
    moved = sum(float((ends[2][name].float() - start[name].float()).norm() ** 2) for name in start) ** 0.5
    apart = sum(float((ends[2][name].float() - ends[1][name].float()).norm() ** 2) for name in start) ** 0.5
    assert apart < 0.05 * moved
    ranks.ask("save", folder=str(saved))
    _update(ranks, path)
    wanted = ranks.parameters()
    _update(ranks, path)
    assert not _same(ranks.parameters(), wanted)
    for _ in ("the same model", "a new one"):
        ranks.ask("load", folder=str(saved), version=0)
        assert _same(ranks.parameters(), ends[1])
        _update(ranks, path)
        assert _same(ranks.parameters(), wanted)
        ranks.build(folder_of(BIG), actor={"zero_stage": 1}, model={"dtype": "bfloat16"})


@pytest.mark.parametrize("count", [1, 2])
def test_in_bfloat16_stage_1_sums_gradients_over_micro_batches_and_ranks_in_float32(
    count: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """With beta1 = 0 and no clipping AdamW's first moment is the gradient, and bfloat16 cannot hold the sum.

    Control: left to DeepSpeed, one micro-batch on one rank has nothing to sum up, and its gradients are bfloat16's.
    """
    ranks = ranks_of(count)
    path = write_rows(tmp_path / "rows.parquet", random_rows(8, samples=2))
    optimizer = {"betas": (0.0, 0.95), "max_grad_norm": 1e9}
    held = {}
    for budget in (32, 10_000):
        ranks.build(folder_of(BIG), actor={"zero_stage": 1, "optimizer": optimizer}, model={"dtype": "bfloat16"})
        ranks.ask("summed_linears", role="actor", keep=budget == 32)
        split = {**SPLIT, "micro_batch_tokens": budget}
        ranks.ask("update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=1e-2)
        held[budget] = max(reply["in_bfloat16"] for reply in ranks.ask("moments", role="actor"))
    assert held[32] < 0.3
    assert held[10_000] == 1.0 if count == 1 else held[10_000] < 0.8


def test_actor_and_critic_of_a_group_are_saved_side_by_side(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Both come back, and neither as the other."""
    rows = random_rows(8)
    old_T = rows.columns["returns"].values_T
    path = write_rows(tmp_path / "rows.parquet", with_columns(rows, {"values": old_T}))
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    two_ranks.build(folder_of(SHAPE), ("actor", "critic"), algorithm={"name": "ppo"}, critic={"zero_stage": 1})

    def update() -> None:
        _update(two_ranks, path)
        two_ranks.ask("update_critic", path=path, split=SPLIT, clip=None, learning_rate=1e-2)

    update()
    two_ranks.ask("save", folder=str(saved))
    before: dict[str, Any] = {role: two_ranks.parameters(role) for role in ("actor", "critic")}
    update()
    assert not any(_same(two_ranks.parameters(role), before[role]) for role in before)
    two_ranks.ask("load", folder=str(saved), version=0)
    assert all(_same(two_ranks.parameters(role), before[role]) for role in before)


def test_only_the_first_rank_copies_a_sharded_model_that_is_written(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """All gather, one writes: the machine's memory holds one copy, not one for each rank."""
    two_ranks.build(folder_of(BIG), actor={"zero_stage": 3})
    first, second = two_ranks.ask("gathered")
    assert "model.embed_tokens.weight" in first["names"]
    assert second["names"] == []


def _odd(path: Path, count: int = 8) -> str:
    """Write experience whose advantages are no numbers."""
    rows = random_rows(count)
    return write_rows(path, with_columns(rows, {"advantages": np.full(len(rows.responses.values_T), np.nan)}))


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")])
def test_a_step_whose_gradient_is_not_finite_is_skipped_and_said_and_three_in_a_row_are_an_error(
    stage: int, dtype: str, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """The weights stay as they are, and the next step is as if it had not been. Control: a step between counts anew."""
    one_rank.build(folder_of(BIG), actor={"zero_stage": stage}, model={"dtype": dtype})
    good, odd = write_rows(tmp_path / "good.parquet", random_rows(8)), _odd(tmp_path / "odd.parquet")
    before = one_rank.parameters()
    update = {"version": -1, "split": {**SPLIT, "micro_batch_tokens": 64}, "loss": LOSS, "learning_rate": 1e-2}
    for path, skipped in ((odd, 1.0), (odd, 1.0), (good, 0.0), (odd, 1.0), (odd, 1.0)):
        reply = one_rank.ask("update_actor", path=path, **update)[0]
        assert reply["skipped_steps"] == skipped
        after = one_rank.parameters()
        assert _same(before, after) == bool(skipped)
        assert all(bool(value.isfinite().all()) for value in after.values())
        before = after
    error = one_rank.ask("refusal", of="update_actor", arguments={"path": odd, **update})[0]["error"]
    assert "not finite (NaN or infinite) in 3 optimizer steps in a row" in error
    assert ("model.dtype=float32" in error) == (dtype == "bfloat16"), "advice that is followed already"
    assert _same(before, one_rank.parameters())


def test_the_first_such_step_ends_a_training_that_asks_for_that(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Under its own name; the weights stay. Control: by default it is the third (above)."""
    one_rank.build(folder_of(BIG), faults={"gradient": "stop"})
    before = one_rank.parameters()
    arguments = {"path": _odd(tmp_path / "odd.parquet"), "version": -1, "split": SPLIT, "loss": LOSS}
    asked = {"of": "update_actor", "arguments": {**arguments, "learning_rate": 1e-2}}
    error = one_rank.ask("refusal", **asked)[0]["error"]
    assert "not finite (NaN or infinite) in 1 optimizer step\n" in error
    assert _same(before, one_rank.parameters())


def test_without_zero_the_first_such_step_is_an_error_before_the_weights_are_lost(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """There DeepSpeed would take it, and every weight would be NaN."""
    one_rank.build(folder_of(BIG), actor={"zero_stage": 0})
    before = one_rank.parameters()
    arguments = {"path": _odd(tmp_path / "odd.parquet"), "version": -1, "split": SPLIT, "loss": LOSS}
    asked = {"of": "update_actor", "arguments": {**arguments, "learning_rate": 1e-2}}
    error = one_rank.ask("refusal", **asked)[0]["error"]
    assert "not finite (NaN or infinite) in 1 optimizer step\n" in error
    assert "extreme rewards in the newest experience file" in error
    assert "model.dtype" not in error
    assert _same(before, one_rank.parameters())


def test_training_without_rollout_counts_skipped_steps_and_speaks_of_its_data(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """There are no rewards and no experience. Control: rows as they should be skip nothing."""
    rows = random_rows(8)
    for odd, skipped in ((False, 0), (True, 2)):
        spoilt = np.full(len(rows.responses.values_T), np.nan if odd else -1.0)
        path = write_rows(tmp_path / f"{odd}.parquet", with_columns(rows, {"logprobs_reference": spoilt}))
        one_rank.ask("discard")
        config = SftConfig(steps=5).model_dump(mode="json")
        model = {"trainer": config, "folder": str(folder_of(BIG)), "dtype": "float32", "seed": 0}
        one_rank.ask("preference_begin", model=model, scores=False)
        steps = {"path": path, "budget": 400, "loss": {"name": "dpo", "settings": {"beta": 0.1}}, "learning_rate": 1e-2}
        reply = one_rank.ask("preference_steps", batches=np.array([[0, 1], [2, 3]]), **steps)[0]
        assert sum(step["skipped_steps"] for step in reply.steps) == skipped
    arguments = {"batches": np.array([[0, 1]]), **steps}
    error = one_rank.ask("refusal", of="preference_steps", arguments=arguments)[0]["error"]
    assert "look for odd rows in the data" in error
    assert "experience" not in error
    _begin(one_rank, folder_of(BIG), path, 1)
    reply = one_rank.ask("sft_steps", batches=np.array([[0, 1]]), budget=40, learning_rate=PEAK)[0]
    assert [step["skipped_steps"] for step in reply.steps] == [0.0]
    assert reply.steps[0]["tokens"] > 0


@pytest.mark.parametrize("count", [1, 2])
def test_states_that_rest_in_host_memory_train_alike(
    count: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Two updates, a checkpoint and one more end bit for bit as without. The weights never move: vLLM still sees them.

    Controls: without the setting nothing is moved, and a change to the resting copy changes the result.
    """
    ranks, folder, roles = ranks_of(count), folder_of(BIG), ("actor", "rollout")
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    ends = {}
    for number, (offload, spoil) in enumerate(((False, False), (True, False), (True, True))):
        saved = tmp_path / f"checkpoint{number}"
        saved.mkdir()
        ranks.build(folder, roles, actor={"zero_stage": 2, "offload_optimizer": offload})
        addresses = ranks.ask("addresses", role="actor")
        moved = ["hp_params", "optim_states"] if offload else []
        for version in (0, 1):
            assert ranks.ask("offloaded", role="actor")[0]["states"] == moved
            _update(ranks, path, version=version)
            ranks.ask("reshard", version=version + 1)
            assert ranks.ask("addresses", role="actor") == addresses
        if spoil:
            ranks.ask("spoil_offloaded", role="actor")
        ranks.ask("save", folder=str(saved))
        _update(ranks, path, version=2)
        ranks.ask("load", folder=str(saved), version=2)
        _update(ranks, path, version=2)
        assert ranks.ask("offloaded", role="actor")[0]["states"] == moved
        assert all(reply["names"] == [] for reply in ranks.ask("mismatches"))
        ends[offload, spoil] = ranks.parameters()
    assert _same(ends[False, False], ends[True, False])
    assert not _same(ends[False, False], ends[True, True])
