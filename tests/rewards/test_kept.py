"""What others' code starts ends with the process that ran it, however that ends and however it got away."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import RewardPool
from penstock.rewards.types import Sample
from tests.processes import alive, noted, owner_of_noted
from tests.waiting import came_true, until

OWNER = """
import signal, sys, time
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import RewardPool
from penstock.rewards.types import Sample

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    config = RewardConfig(function="reward_examples:leaving", workers=1, timeout_s=60.0)
    with RewardPool(config, []) as pool:
        pool.score([Sample("0", "0", "", sys.argv[1], {})])
        time.sleep(600)
"""


def sample_of(response: str) -> list[Sample]:
    return [Sample("s", "0", "", response, {})]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    """A folder for the numbers of children; those that live at the end of the test are killed."""
    folder = tmp_path / "children"
    folder.mkdir()
    yield folder
    for pid in filter(alive, noted(folder)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("in_this_folder")
@pytest.mark.parametrize("kept", [True, False])
def test_children_live_as_long_as_the_pool(kept: bool, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a module keeps stays until then. Control: without the keeper they stay for good."""
    if not kept:
        monkeypatch.setattr("penstock.usercode.workers.Kept", lambda: multiprocessing.get_context("spawn"))
    with RewardPool(RewardConfig(function="reward_examples:leaving", workers=1, timeout_s=60.0), []) as pool:
        assert [score.reward for score in pool.score(sample_of(str(notes)))] == [1.0]
        children = noted(notes)
        assert len(children) == 3
        assert all(map(alive, children))
    assert list(map(alive, children)) == [not kept] * 3


@pytest.mark.usefixtures("in_this_folder")
def test_children_end_with_a_worker_that_is_killed(notes: Path) -> None:
    """SIGKILL, as at a deadline in C; the pool goes on, and its next worker's children are its own."""
    config = RewardConfig(function="reward_examples:leaving", workers=1, timeout_s=2.0, failure_value=-1.0)
    with RewardPool(config, []) as pool:
        assert [score.reward for score in pool.score(sample_of(f"hang:{notes}"))] == [-1.0]
        children = noted(notes)
        assert len(children) == 3
        until(lambda: not any(map(alive, children)), 20, "the children of the killed worker ended")
        pool.score(sample_of(str(notes)))
        (worker,) = pool._workers._pool._pool_manager.worker_manager.workers
        later = set(noted(notes)) - set(children)
        assert len(later) == 3 and all(map(alive, later))
        os.kill(worker, signal.SIGKILL)
        until(lambda: not any(map(alive, later)), 20, "the children of the second worker ended")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_end_with_the_training(tmp_path: Path, number: signal.Signals) -> None:
    """After `kill -9` nothing of it runs any more; after Ctrl-C it ends in order."""
    with owner_of_noted(tmp_path, OWNER, Path(__file__).parent) as (owner, notes):
        assert came_true(lambda: len(list(notes.iterdir())) == 3, 60)
        children = noted(notes)
        assert all(map(alive, children))
        owner.send_signal(number)
        owner.wait()
        assert came_true(lambda: not any(map(alive, children)), 20)
