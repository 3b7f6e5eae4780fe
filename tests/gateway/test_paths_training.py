"""Whole trainings that learn from several paths of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.engines.batches.packing import read_rows
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.experience import PATHS, column_names, origin_of, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights
from tests.gateway.chat_training import DIGITS, ITERATIONS, check_that_it_ended_alike, killed_and_resumed, trained
from tests.gateway.test_same_episodes import APART, ROOT, SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("flows"),
    pytest.mark.timeout(900),
]

SAMPLES = 8


def says(row: dict[str, Any], right: bool, generator: np.random.Generator) -> list[dict[str, Any]]:
    return [{**row, "response": f"It is {row['wanted'] if right else generator.integers(0, 2 * DIGITS - 1)}."}]


@pytest.fixture(scope="module")
def learned(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training of an agent with two paths."""
    environment = {"type": "tests.gateway.branching:Twice", "max_turns": 3, "max_paths": 2, "timeout_s": 120}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return trained(tmp_path_factory.mktemp("twice"), environment, says, tokens=60)


def test_all_turns_are_learnt_from(learned: RunFolder) -> None:
    """Three of each sample on two paths, with one advantage for all that a sample said, compared with the others of
    its group. Control: turns that are cut leave paths of one turn, and samples of a group differ.
    """
    rows = read_rows(str(learned.experience(1)), ["advantages"])
    columns = read_columns(learned.experience(1), ["reward", "turns", "unbridged_turns", "group", "prompt_id"])
    assert rows.paths is not None and not columns["unbridged_turns"].any()
    assert len(rows) == len(columns["reward"]) == 16 * SAMPLES and (rows.paths.counts_B == 2).all()
    assert (columns["turns"] == 3).mean() > 0.9
    groups = columns["reward"].reshape(-1, SAMPLES)
    spread = groups.std(axis=1, keepdims=True)
    found = np.asarray([rows.columns["advantages"].row(row)[0] for row in range(len(rows))]).reshape(-1, SAMPLES)
    assert (spread > 0).any() and (
        np.sign(found) == np.sign(np.round(groups - groups.mean(axis=1, keepdims=True), 9))
    ).all()
    for row in range(len(rows)):
        counted = rows.columns["advantages"].row(row)[rows.mask.row(row) > 0]
        assert (counted == counted[0]).all()
        first, second = rows.paths.of_rows(np.array([row])).tolist()
        prompts = rows.sequences.prompts
        assert prompts.row(first).tolist() == prompts.row(second).tolist()
        assert rows.sequences.mask.row(second).all(), "one turn"
    figures = {item["iteration"]: item["metrics"] for item in read_metrics(learned)}
    assert all(figures[iteration]["rollout/paths"] == 2 for iteration in range(1, ITERATIONS + 1))
    assert figures[ITERATIONS]["reward/mean"] > figures[1]["reward/mean"]


def test_a_killed_training_ends_as_one_left_alone(learned: RunFolder) -> None:
    check_that_it_ended_alike(killed_and_resumed(learned.path.parent, "penstock.engines.groups.rank"), learned)


TWICE = (
    "environment={type: 'tests.gateway.branching:CalculatedTwice', max_turns: 4, max_paths: 2, workers: 1}",
    "rollout.max_response_tokens=40",
    "evaluate={every: 0, temperature: 1.0}",
    "algorithm.mini_batches=1",
    APART,
)


@pytest.mark.usefixtures("prefect_harness")
def test_paths_are_learnt_from_by_portions(tmp_path: Path) -> None:
    """With the experience of one that waits for the whole batch, path by path, and its figures, to rounding; a replay
    adds the same numbers in the same order. Controls: there are two paths, and portions are no prompts in their order.
    """
    runs = []
    for more in ([], ["rollout.stream.portions=4"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            patch.syspath_prepend(str(ROOT))
            runs.append(RunFolder(tmp_path / f"{len(runs)}"))
            config = load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *TWICE, *more])
            train(config, run_folder=str(runs[-1].path))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert replay(str(runs[1].path), 2).equal
    for number in (1, 2):
        files = [run.experience(number) for run in runs]
        assert sorted(column_names(files[0])) == sorted(column_names(files[1]))
        for name in ("prompt_tokens", "response_tokens", "loss_mask", *PATHS):
            waited, streamed = (read_columns(path, [name])[name] for path in files)
            assert np.array_equal(waited.values_T, streamed.values_T), name
            assert np.array_equal(waited.offsets_B1, streamed.offsets_B1), name
        rows = read_rows(str(files[1]), ["advantages"])
        assert rows.paths is not None and (rows.paths.counts_B == 2).mean() > 0.9
        figures = [
            {name: value for name, value in item["metrics"].items() if name.startswith(("actor/", "reward/"))}
            for run in runs
            for item in read_metrics(run)
            if item["iteration"] == number
        ]
        for name, value in figures[0].items():
            if not name.endswith(("_s", "micro_batches", "computed_share", "branched_share")):
                assert figures[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    portions = origin_of(runs[1].experience(2))["portions"]
    assert len(portions) == 4 and sum(portions, []) != list(range(16))


@pytest.mark.usefixtures("prefect_harness")
def test_an_agent_that_never_branches_ends_in_the_same_bits(tmp_path: Path) -> None:
    """With its figures, but for the number of paths, which is 1. Control: that figure is there."""
    runs = []
    for most in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            own = ["environment.type=penstock.environments.calculator:CalculatorAgent", f"environment.max_paths={most}"]
            train(
                load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *own]), run_folder=str(tmp_path / str(most))
            )
        runs.append(RunFolder(tmp_path / str(most)))
    one, several = runs
    assert weights(one) == weights(several)
    found = numbers(several)
    assert {item.pop("rollout/paths", None) for _, item in found} == {1.0, None}
    assert found == numbers(one)
