"""Actor and rollout in two groups train as in one, also over a failure and a resume.

Both trainings make the same two iterations on the CPU. What differs is how weights get from one to the other: shared
memory, or a broadcast between processes. So every token and every figure of the updates must be the same. The reference
lives with the rollout: its hidden states and its refresh go through files. Its weight in the loss is so small that a
last bit of the KL, a sum over the vocabulary, moves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.flows.train import train
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.flows.reward_functions import BREAK
from tests.sockets import Door, noted_doors, open_to_others

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=2",
    "data.arithmetic={digits: 2, sft: 128, train: 40, heldout: 16}",
    "sft.steps=5",
    "sft.batch=32",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0}",
    "evaluate={every: 1, temperature: 1.0}",
    "checkpoint.every=1",
    "algorithm.kl={estimator: full, coefficient: 1e-6, refresh_every: 1}",
)
DOORS: set[Door] = set()  # on which the resumed training has listened
APART = ("groups={train: {ranks: 1, roles: [actor]}, generate: {ranks: 1, roles: [rollout, reference]}}",)


def _train(folder: Path, *overrides: str) -> RunFolder:
    train(load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *overrides]), run_folder=str(folder))
    return RunFolder(folder)


@pytest.fixture(scope="module")
def together(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A training in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return _train(tmp_path_factory.mktemp("runs") / "together")


@pytest.fixture(scope="module")
def apart(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A training in two groups that failed in its second iteration and was resumed."""
    folder = tmp_path_factory.mktemp("runs") / "apart"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv(BREAK, str(RunFolder(folder).experience(2)))
        with pytest.raises(Exception, match="broken"):
            _train(folder, *APART)
        assert read_manifest(RunFolder(folder)).progress.iteration == 1
        patch.delenv(BREAK)
        RunFolder(folder).experience(2).unlink()  # to be generated again, with the restored weights
        with noted_doors(DOORS):
            train(resume=str(folder))
    return RunFolder(folder)


def test_two_groups_train_as_one_does(together: RunFolder, apart: RunFolder) -> None:
    """The same tokens before and after an update has gone through a reshard, and the same update from them."""
    for iteration in (1, 2):
        ours, theirs = (
            read_columns(run.experience(iteration), ["response_tokens", "policy_version"]) for run in (together, apart)
        )
        assert np.array_equal(ours["response_tokens"].values_T, theirs["response_tokens"].values_T)
        assert set(theirs["policy_version"]) == {iteration - 1}
    first, second = (read_columns(apart.experience(iteration), ["response_tokens"]) for iteration in (1, 2))
    assert len(first["response_tokens"].values_T) > 100
    assert not np.array_equal(first["response_tokens"].values_T, second["response_tokens"].values_T)
    for one, other in zip(read_metrics(together), read_metrics(apart), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "heldout/reward", "heldout/accuracy"):
            assert one["metrics"].get(name) == other["metrics"].get(name)


def test_the_reference_follows_the_actor_into_the_other_group(together: RunFolder, apart: RunFolder) -> None:
    """Refreshed after the first iteration, and restored with the checkpoint: the KL of the second is the same.

    Before the refresh the policy had left the start, so a reference that stayed there would show.
    """
    ours, theirs = ([record["metrics"] for record in read_metrics(run)] for run in (together, apart))
    assert ours[0]["heldout/kl"] == theirs[0]["heldout/kl"] == 0
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        for name in ("actor/kl", "heldout/kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-4)
            assert one[name] > 1e-4
    for run in (together, apart):
        assert "time/refresh_reference_s" in read_metrics(run)[1]["metrics"]
        assert "time/refresh_reference_s" not in read_metrics(run)[2]["metrics"]
        assert not [*run.path.rglob("*.npy"), *run.path.glob("*.safetensors")]


def test_other_machines_reach_no_socket_of_two_groups(apart: RunFolder) -> None:
    """The store in which they meet and the sockets of the group that broadcasts are on the loopback interface, too."""
    assert (
        len({door for door in DOORS if "penstock.engines.groups.rank" in door.command}) >= 5
    )  # three stores, and gloo's
    assert open_to_others(DOORS) == []


def test_each_says_how_it_resharded(together: RunFolder, apart: RunFolder) -> None:
    """Shared weights move no bytes; a broadcast moves all of them, every time."""
    for run, strategy in ((together, "shared"), (apart, "broadcast")):
        moved = [record["metrics"]["reshard/bytes"] for record in read_metrics(run)[1:]]
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
        assert summary["reshard_strategy"] == strategy
        assert moved == [0.0 if strategy == "shared" else 4.0 * summary["parameters"]] * 2
        assert (summary["parameters_shared"] > 0, summary["parameters_copied"] > 0) == (
            strategy == "shared",
            strategy == "broadcast",
        )
