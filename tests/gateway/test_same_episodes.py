"""Agents over HTTP play, and train, as an environment inside the loop does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.state.experience import column_names, origin_of, read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=2",
    "data.arithmetic={digits: 2, calls: 0.4, sft: 1000, train: 200, heldout: 32}",
    "sft.steps=60",
    "sft.batch=64",
    "rollout={prompts: 16, samples: 8, max_response_tokens: 20, max_sequences: 128}",
    "evaluate={every: 2, temperature: 1.0}",
    "algorithm.correction={}",
)
COMPARED = ("prompt_tokens", "response_tokens", "loss_mask", "turns", "reward", "advantages", "logprobs_rollout")


@pytest.mark.usefixtures("prefect_harness")
def test_the_calculator_over_http_is_the_calculator(tmp_path: Path) -> None:
    """Tokens, masks, rewards and trained weights are equal to the last bit. Control: many episodes have two turns."""
    runs = {}
    for name, kind in (("inside", None), ("asked", "penstock.environments.calculator:CalculatorAgent")):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            other = [] if kind is None else [f"environment.type={kind}"]
            train(load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *other]), run_folder=str(tmp_path / name))
        runs[name] = RunFolder(tmp_path / name)
    inside, asked = (read_columns(run.experience(2), [*COMPARED]) for run in runs.values())
    for name in COMPARED:
        for ours, theirs in zip(
            *(np.atleast_1d(getattr(c[name], "values_T", c[name])) for c in (inside, asked)), strict=True
        ):
            assert ours == theirs, name
    assert 0.2 < float((asked["turns"] == 2).mean()) < 0.95
    assert weights(runs["inside"]) == weights(runs["asked"])
    (figures,) = [item["metrics"] for item in read_metrics(runs["asked"]) if item["iteration"] == 2]
    assert figures["rollout/unbridged_turns"] == 0 == figures["rollout/environment_failures"]
    without = [
        (n, {k: v for k, v in item.items() if not k.endswith("unbridged_turns")}) for n, item in numbers(runs["asked"])
    ]
    assert without == numbers(runs["inside"])


APART = "groups={training: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}"
WITHOUT_WAITING = {
    "portions": ("rollout.stream.portions=4", "algorithm.mini_batches=1", APART),
    "carry": ("rollout.carry={extra: 0.5, staleness: 2}", "iterations=4", "algorithm.correction=null"),
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", sorted(WITHOUT_WAITING))
def test_they_are_the_same_where_nobody_waits(way: str, tmp_path: Path) -> None:
    """By portions, and carried over: experience, whose prompts are the agent's, what is carried, policy versions token
    by token, and weights are those of the calculator inside to the last bit, in a replay, too. Controls: portions are
    no prompts in their order; of what is carried some episodes are in the middle of a turn, and some go on under
    another policy.
    """
    runs = {}
    for name, other in (
        ("inside", ()),
        ("asked", ("environment.type=penstock.environments.calculator:CalculatorAgent",)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            more = ("evaluate={every: 0, temperature: 1.0}", *WITHOUT_WAITING[way], *other)
            config = load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *more])
            train(config, run_folder=str(tmp_path / name))
            runs[name] = RunFolder(tmp_path / name)
            assert name == "inside" or replay(str(runs[name].path), 2).equal
    inside, asked = runs.values()
    for number in range(1, 1 + read_manifest(asked).progress.iteration):
        names = [*COMPARED, "prompt", *({POLICY_VERSIONS} & {*column_names(asked.experience(number))})]
        assert_alike(inside.experience(number), asked.experience(number), names)
    assert 0.2 < float((read_columns(asked.experience(2), ["turns"])["turns"] == 2).mean()) < 0.95
    assert weights(inside) == weights(asked)
    if way == "portions":
        portions = [origin_of(run.experience(2))["portions"] for run in (inside, asked)]
        assert portions[0] == portions[1] and sum(portions[0], []) != list(range(16))
    else:
        assert_carried_alike(inside, asked)


def assert_alike(inside: Path, asked: Path, names: Sequence[str]) -> None:
    columns = [read_columns(path, [*names]) for path in (inside, asked)]
    for name in names:
        ours, theirs = (np.atleast_1d(getattr(found[name], "values_T", found[name])) for found in columns)
        assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), name


def assert_carried_alike(inside: RunFolder, asked: RunFolder) -> None:
    """All that is carried of one inside is carried of an agent, too, which has columns of its own besides."""
    inside_turns, several = 0, 0
    for number in range(1, 5):
        files = [run.carried(number) for run in (inside, asked)]
        names = [
            name for name in column_names(files[0]) if name != "reward"
        ]  # an agent has earned nothing before its end
        assert_alike(*files, names)
        columns = read_columns(files[1], ["tokens", "turn_ends", "ended", "owed"])
        for row in np.flatnonzero(columns["ended"] == 0):
            last = max([0, *columns["turn_ends"].row(row)])
            inside_turns += len(columns["tokens"].row(row)) > last and not columns["owed"][row]
        versions = read_columns(asked.experience(number), [POLICY_VERSIONS])[POLICY_VERSIONS]
        several += sum(len({*versions.row(row).tolist()}) > 1 for row in range(len(versions)))
    assert inside_turns > 3 and several > 3, (inside_turns, several)
