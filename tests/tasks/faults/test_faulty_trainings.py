"""Whole trainings whose numbers go wrong: what was learnt from the batch is nothing, and the batch is kept.

One learning rate is far too large in one iteration of the schedule, or a limit is so low that any figure exceeds it.
Weights are compared bit for bit with those of a training that ended before the fault.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.base.errors import GradientNotFinite, KlExploded
from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.events import FAULT, read_events
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.tasks.export_run import export_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
RATE = "actor.optimizer={learning_rate: 1e-3, warmup_steps: 0}"
SMALL = (
    "sft=null",
    "data.arithmetic={digits: 2, sft: 64, train: 64, heldout: 8}",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "evaluate.every=0",
    "checkpoint={every: 2, keep: 3}",
    "record.experiment=faults",
)
STEPS = (*SMALL, "algorithm={name: grpo, mini_batches: 2}")
IN_REWARD = (
    *SMALL,
    "algorithm={name: grpo, mini_batches: 1}",
    "algorithm.kl={place: reward, estimator: k1, coefficient: 0.05}",
)


WAYS = ["snapshot", pytest.param("checkpoint", marks=pytest.mark.exhaustive)]


@pytest.fixture(autouse=True)
def in_the_repository(prefect_harness: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes name functions of the tests."""
    monkeypatch.chdir(ROOT)


def trained(folder: Path, *overrides: str) -> RunFolder:
    """Train with the quickstart's recipe and overrides."""
    train(load_config(ROOT / "configs" / "quickstart.yaml", overrides), run_folder=str(folder))
    return RunFolder(folder)


@pytest.fixture(scope="module")
def plain(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Three iterations without any limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return trained(tmp_path_factory.mktemp("runs") / "plain", *STEPS, RATE, "iterations=3")


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """Return the trained weights."""
    return load_file(run.model("final") / "model.safetensors")


def weights_at(run: RunFolder, iteration: int) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    left_out = shutil.ignore_patterns("final", "experience")
    copy = RunFolder(shutil.copytree(run.path, run.path.with_name(f"{run.name}-{iteration}"), ignore=left_out))
    manifest = read_manifest(copy)
    progress = replace(manifest.progress, iteration=iteration)
    write_manifest(copy, replace(manifest, checkpoint=f"{iteration:06d}", progress=progress))
    return load_file(export_run(copy, copy.path / "exported", None).folder / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def figures(run: RunFolder) -> dict[int, dict[str, float]]:
    """Return the recorded figures by iteration."""
    return {item["iteration"]: item["metrics"] for item in read_metrics(run)}


def of_faults(recorded: dict[str, float]) -> dict[str, float]:
    """Return the figures that a fault leaves."""
    return {name: value for name, value in recorded.items() if name.startswith(("fault/", "update/undone"))}


def back_by(way: str, patch: pytest.MonkeyPatch) -> None:
    """Let trainings go back by a snapshot alone, or, as where memory has no room for snapshots, by a checkpoint."""
    if way == "checkpoint":
        patch.setattr("penstock.session.session.snapshots_fit", lambda *_: False)
    else:
        patch.setattr(
            "penstock.flows.parts.state_before.planned", lambda *_, **__: pytest.fail("a checkpoint was looked for")
        )


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_went_too_far_is_undone_and_the_training_goes_on(
    way: str, plain: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 4 ruins the policy within its own steps; snapshot 3 brings it back, or checkpoint 2 and an update.

    Control: the same training without the limit ends with other weights.
    """
    back_by(way, monkeypatch)
    rate = "actor.optimizer={learning_rate: {0: 1e-3, 4: 1.0, 5: 1e-3}, warmup_steps: 0}"
    assert not same(weights(trained(tmp_path / "ruined", *STEPS, rate, "iterations=4")), weights(plain))
    limit = "faults.update_kl={limit: 1.0, action: rollback}"
    six = trained(tmp_path / "six", *STEPS, rate, "iterations=6", limit)
    assert same(weights_at(six, 4), weights(plain))
    recorded = figures(six)
    marks = [of_faults(recorded[number]) for number in (3, 4, 5, 6)]
    assert marks == [{}, {"fault/update_kl": 1.0, "update/undone": 4.0}, {}, {}]
    assert recorded[4]["actor/approx_kl"] > 1.0 > recorded[5]["actor/approx_kl"]
    drawn = [read_columns(six.experience(number), ["prompt_id"])["prompt_id"] for number in range(1, 7)]
    assert len({name for names in drawn for name in names}) == 48  # every prompt once, also those of iteration 4
    kept = json.loads(six.faulty(4).with_suffix(".json").read_text(encoding="utf-8"))
    assert (kept["iteration"], kept["name"], kept["action"]) == (4, "update_kl", "rollback")
    (event,) = read_events(six)
    assert (event["event"], event["iteration"], event["action"]) == (FAULT, 4, "rollback")
    assert read_columns(six.faulty(4), ["advantages"])["advantages"].values_T.any()

    for number in (4, 6):  # the update that was undone, and one after it
        done = replay(str(six.path), number, ["update_actor"])
        assert [row for row in done.rows if not row.equal] == []
        assert "actor/approx_kl" in {row.what for row in done.rows}


@pytest.mark.parametrize("way", WAYS)
def test_the_update_before_the_batch_that_shows_the_fault_is_undone_too(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 3 ruins the policy, which the KL of the batch of iteration 4 shows: back to the state after 2.

    Control: the snapshot of iteration 3, which is newer, has other weights.
    """
    back_by(way, monkeypatch)
    rate = "actor.optimizer={learning_rate: {0: 1e-3, 3: 1.0, 4: 1e-3}, warmup_steps: 0}"
    every = "checkpoint={every: 1, keep: 5}"
    limit = "faults.kl={limit: 1.0, action: rollback}"
    five = trained(tmp_path / "five", *IN_REWARD, rate, every, "iterations=5", limit)
    assert [figures(five)[number].get("update/undone") for number in range(1, 6)] == [None, None, 4.0, 4.0, None]
    before = weights_at(five, 2)
    assert same(weights_at(five, 4), before)
    assert not same(weights_at(five, 3), before)


def test_a_batch_beyond_the_limit_is_not_learnt_from_and_the_third_in_a_row_ends_the_training(tmp_path: Path) -> None:
    """Once the policy has moved, any KL is beyond a limit this low. Control: the first iteration, where it is 0."""
    always = "checkpoint={every: 1, keep: 3}"
    moved = trained(tmp_path / "moved", *IN_REWARD, RATE, "iterations=2", always)
    with pytest.raises(
        KlExploded, match=r"third iteration in a row\n.*faults/000004.parquet.*penstock replay"
    ) as caught:
        trained(tmp_path / "four", *IN_REWARD, RATE, "iterations=6", always, "faults.kl={limit: 1e-9, action: skip}")
    assert "faults.kl=null" in caught.value.remedy
    skipped = RunFolder(tmp_path / "four")
    assert sorted(figures(skipped)) == [0, 1, 2, 3]
    told = [(event["iteration"], event["action"]) for event in read_events(skipped)]
    assert told == [(2, "skip"), (3, "skip"), (4, "stop")]
    assert [figures(skipped)[number].get("fault/kl") for number in (1, 2, 3)] == [None, 1.0, 1.0]
    assert "actor/loss" not in figures(skipped)[2]
    one = weights_at(moved, 1)
    assert same(weights_at(skipped, 3), one)
    assert not same(weights(moved), one)


def test_weights_that_are_no_numbers_end_the_training_with_the_batch_kept(tmp_path: Path) -> None:
    """Steps of a size that overflows, then three whose gradients are NaN. A replay of the batch comes to the same."""
    rate = "actor.optimizer={learning_rate: {0: 1e-3, 2: 2e38}, warmup_steps: 0}"
    overrides = (*SMALL, "algorithm={name: grpo, mini_batches: 8, epochs: 2}", rate, "iterations=6")
    with pytest.raises(GradientNotFinite, match=r"3 optimizer steps in a row\n.*penstock replay .* \d update_actor"):
        trained(tmp_path / "run", *overrides)
    run = RunFolder(tmp_path / "run")
    number = max(figures(run)) + 1
    assert number >= 2
    assert np.isfinite(read_columns(run.faulty(number), ["advantages"])["advantages"].values_T).all()
    assert json.loads(run.faulty(number).with_suffix(".json").read_text(encoding="utf-8"))["name"] == "gradient"
    assert read_events(run)[-1]["batch"] == f"faults/{number:06d}.parquet"
    with pytest.raises(GradientNotFinite, match="3 optimizer steps in a row"):
        replay(str(run.path), number, ["update_actor"])


def test_limits_that_are_not_reached_change_no_bit(plain: RunFolder, tmp_path: Path) -> None:
    """Weights and figures are those of a training without any."""
    faults = (
        "faults={update_kl: {limit: 9}, entropy: {limit: 1e-9, action: rollback}, reward: {fall: 9}, gradient: stop}"
    )
    watched = trained(tmp_path / "watched", *STEPS, RATE, "iterations=3", faults)
    assert same(weights(plain), weights(watched))
    assert figures(plain)[3].keys() == figures(watched)[3].keys()
    assert read_events(watched) == []
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean"):
        assert figures(plain)[3][name] == figures(watched)[3][name]
