"""The pool: every way to fail costs only the rows that failed, and is counted, replaced and named."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import RewardTimeout, UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import MOST_WORKERS, RewardPool, Score, check_failures, log_failures
from penstock.rewards.server import NOT_ASKED
from penstock.rewards.types import Sample
from penstock.usercode.guard import reward_and_parts
from penstock.usercode.workers import default_workers
from tests.processes import alive, owner_of_noted
from tests.waiting import came_true

FAILED = -1.5
DIED = "the worker process died"


def samples_of(*responses: str) -> list[Sample]:
    return [
        Sample(f"s{k}", f"{k}", "0", response, {"answer": k, "prompt": "unused"})
        for k, response in enumerate(responses)
    ]


def config_of(name: str, **settings: Any) -> RewardConfig:
    fields: dict[str, Any] = {"timeout_s": 0.3, "failure_value": FAILED, "workers": 2, **settings}
    return RewardConfig(function=f"reward_examples:{name}", **fields)


@contextmanager
def pool_of(name: str, **settings: Any) -> Iterator[RewardPool]:
    with RewardPool(config_of(name, **settings), ["answer"]) as pool:
        yield pool


@pytest.fixture(scope="module")
def misbehave(in_this_folder: None) -> Iterator[RewardPool]:
    with pool_of("misbehave") as pool:
        yield pool


def test_order_is_kept(misbehave: RewardPool) -> None:
    """Score k belongs to sample k, whatever the chunks and the workers."""
    scores = misbehave.score(samples_of(*map(str, range(301))))
    assert [score.reward for score in scores] == list(range(301))
    assert misbehave.score([]) == []


def test_parts_that_make_one_make_exactly_one() -> None:
    """Held-out accuracy counts rewards of 1. Control: one addition after the other falls short of it."""
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert reward_and_parts({"sum": 0.7, "form": 0.2, "length": 0.1})[0] == 1.0


def test_parts_and_kinds_of_numbers(misbehave: RewardPool) -> None:
    """A part named reward is the reward; otherwise the parts are summed; a bool is a number."""
    assert misbehave.score(samples_of("parts", "named", "true", "print")) == [
        Score(1.5, {"format": 1.0, "correct": 0.5}, None),
        Score(0.25, {"reward": 0.25, "length": 9.0}, None),
        Score(1.0, {}, None),
        Score(1.0, {}, None),
    ]


FAILURES = {
    "raise": "LookupError: no such answer (reward_examples.py:",
    "loop": "timed out after 0.3 s",
    "swallow": "timed out after 0.3 s",
    "regex": "timed out after 0.3 s",
    "hang": "timed out after 0.3 s in code that could not be interrupted",
    "die": f"{DIED} (exit code 7)",
    "exit": "SystemExit: 3",
    "nan": "ValueError: the reward is nan",
    "infinite part": "ValueError: part 'correct' is inf",
    "huge": "ValueError: the reward is 1e+300, beyond +-1e+12",
    "no parts": "ValueError: returned a dict without parts",
    "text": "TypeError: the reward is a str, not a number",
    "none": "TypeError: the reward is None: nothing was returned for it",
}


def test_only_the_culprits_fail(misbehave: RewardPool) -> None:
    """Each way to fail is replaced and explained, and the rows between, in the same chunks, keep their rewards."""
    responses = [text for k, name in enumerate(FAILURES) for text in (str(k), name)]
    scores = misbehave.score(samples_of(*responses))
    assert [score.reward for score in scores[::2]] == list(range(len(FAILURES)))
    assert all(score.failure is None for score in scores[::2])
    for score, (name, reason) in zip(scores[1::2], FAILURES.items(), strict=True):
        assert (score.reward, score.parts) == (FAILED, {}), name
        assert score.failure is not None and score.failure.startswith(reason), (name, score.failure)
    assert misbehave.score(samples_of("4"))[0].reward == 4.0


@pytest.mark.parametrize(("broken", "score"), [(2, Score(4.0, {}, None)), (3, Score(FAILED, {}, DIED))])
def test_a_row_whose_pool_another_broke_is_scored_again(broken: int, score: Score) -> None:
    """A worker that dies at once takes all that its pool was given along. Control: three pools, and it is the row."""
    with pool_of("misbehave") as pool:
        pool.score([])
        workers = pool._workers._pool
        schedule, given = workers.schedule, []

        def breaking(*arguments: Any, **settings: Any) -> Any:
            given.append(arguments)
            if len(given) > broken:
                return schedule(*arguments, **settings)
            lost: Future[list[Score]] = Future()
            lost.set_exception(BrokenProcessPool("All workers expired"))
            return lost

        workers.schedule = breaking  # type: ignore[method-assign]
        assert pool.score(samples_of("4")) == [score]
        assert len(given) == 3


def test_columns_and_settings_reach_the_worker() -> None:
    """The worker sees the same arguments as a direct call would."""
    with RewardPool(config_of("sources", settings={"bonus": 0.5}), ["answer"]) as pool:
        samples = [Sample("s", "2", "3", "4", {"answer": "5"})]
        assert pool.score(samples) == [Score(4325.5, {}, None)]


def test_batch_functions() -> None:
    """A batch gets lists; a wrong count or an exception fails all of its rows, a bad value its own row only."""
    with pool_of("batch", workers=1) as pool:
        assert [score.reward for score in pool.score(samples_of("a", "nan", "c"))] == [0.0, FAILED, 2.0]
        short = pool.score(samples_of("a", "short", "c"))
        assert [score.failure for score in short] == ["ValueError: returned 2 values for 3 rows"] * 3
        one = pool.score(samples_of("a", "one"))
        assert [score.failure[:54] for score in one if score.failure] == [
            "TypeError: returned 1.0 for 2 rows, not a list of as m"
        ] * 2
        raised = pool.score(samples_of("a", "raise"))
        assert all((score.failure or "").startswith("LookupError: no such batch") for score in raised)
    with pool_of("batch_async", workers=1) as pool:
        assert [score.reward for score in pool.score(samples_of("a", "bcd"))] == [1.0, 3.0]
        assert [score.failure for score in pool.score(samples_of("a", "slow"))] == ["timed out after 0.3 s"] * 2


def test_coroutines_of_a_chunk_run_together() -> None:
    """Twenty calls that wait for each other all return; with a row too few they would wait for ever."""
    with pool_of("meet", workers=1, timeout_s=5.0) as pool:
        assert [score.reward for score in pool.score(samples_of(*["20"] * 20))] == [1.0] * 20
    with pool_of("meet", workers=1) as pool:
        assert [score.reward for score in pool.score(samples_of(*["20"] * 19))] == [FAILED] * 19


def test_async_failures() -> None:
    """A coroutine is cancelled at its deadline; its own TimeoutError is told from ours; a hang is killed."""
    with pool_of("misbehave_async", workers=1) as pool:
        scores = pool.score(samples_of("fine", "slow", "raise", "own timeout", "hang", "fine"))
    assert [score.reward for score in scores] == [1.0, FAILED, FAILED, FAILED, FAILED, 1.0]
    reasons = [score.failure or "" for score in scores[1:5]]
    assert reasons[0] == "timed out after 0.3 s"
    assert reasons[1].startswith("LookupError: no such answer (reward_examples.py:")
    assert reasons[2].startswith("TimeoutError: the judge is busy")
    assert reasons[3].startswith("timed out after 0.3 s in code that could not be interrupted")


def test_slow_rows_do_not_cost_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose rows are each in time but together are not is continued, not killed: one process scores all."""
    monkeypatch.setattr("penstock.rewards.pool._CHUNKS_PER_WORKER", 1)
    monkeypatch.setattr("penstock.rewards.pool.GRACE_S", 0.5)
    with pool_of("worker_id", workers=1, timeout_s=0.5) as pool:
        before = pool.score(samples_of("0"))
        scores = pool.score(samples_of(*["0.2"] * 10))
    assert scores == before * 10


def test_workers_grow_with_the_machine_unless_the_recipe_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with more GPUs brings more cores and more samples; a laptop keeps two processes."""
    assert [default_workers(cores, MOST_WORKERS) for cores in (1, 2, 16, 64, 256)] == [2, 2, 8, 32, 32]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    for workers, expected, busy_s in ((None, 3, "0.8"), (1, 1, "0")):
        with pool_of("worker_id", workers=workers, timeout_s=5.0) as pool:
            assert len({score.reward for score in pool.score(samples_of(*[busy_s] * 6))}) == expected


def test_a_pool_whose_idle_workers_were_killed_scores_again() -> None:
    """The out-of-memory killer may take workers between two batches."""
    with pool_of("worker_id", timeout_s=5.0) as pool:
        before = {score.reward for score in pool.score(samples_of(*["0.05"] * 4))}
        for worker in before:
            os.kill(int(worker), signal.SIGKILL)
        scores = pool.score(samples_of(*["0.05"] * 16))
        after = {score.reward for score in scores}
    assert before and after and not before & after
    assert all(score.failure is None for score in scores)


def test_a_function_that_loads_only_here_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the workers alone is still an error with a remedy, not a hang."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "home_reward.py").write_text(
        "import multiprocessing\nassert multiprocessing.parent_process() is None\ndef score(response): return 1\n"
    )
    pool = RewardPool(RewardConfig(function="home_reward:score"), [])
    with pool, pytest.raises(UserError, match="'home_reward:score' loads here but not in a worker process"):
        pool.score(samples_of("a"))


def test_leaving_does_not_wait_for_workers_that_are_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may import for minutes, and after Ctrl-C the engines stay up until the pool is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "slow_reward.py").write_text(
        "import multiprocessing, os, pathlib, time\n"
        "if multiprocessing.parent_process() is not None:\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.worker').touch()\n"
        "    time.sleep(250)\n"
        "def score(response): return 1\n"
    )
    with RewardPool(RewardConfig(function="slow_reward:score", workers=1), []):
        assert came_true(lambda: list(tmp_path.glob("*.worker")), 60)
        (note,) = tmp_path.glob("*.worker")
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    assert not alive(int(note.stem))


def batch_with(failures: int, total: int) -> tuple[list[Score], list[Sample]]:
    scores = [Score(FAILED, {}, f"reason {k}") if k < failures else Score(1.0, {}, None) for k in range(total)]
    return scores, samples_of(*["x"] * total)


def test_past_the_share_the_run_stops() -> None:
    """The share is allowed, one more is not; the error shows the first failures by sample id."""
    config = config_of("length", max_failure_share=0.25)
    check_failures(*batch_with(5, 20), config)
    with pytest.raises(UserError) as caught:
        check_failures(*batch_with(6, 20), config)
    text = str(caught.value)
    assert type(caught.value) is UserError, "the control of what is late"
    assert "'reward_examples:length' failed for 6 of 20 samples; reward.max_failure_share allows 25%" in text
    assert "sample s0: reason 0\n" in text and "sample s2: reason 2\n" in text and "and 3 more" in text
    assert "s3" not in text


@pytest.mark.parametrize("name", ["loop", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_function_that_hangs_is_given_up_once_the_outcome_is_certain(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first timeout is told at once; above the share the others are not asked. Control: within it all are."""
    with pool_of("misbehave", timeout_s=0.5) as pool, caplog.at_level(logging.WARNING):
        samples = samples_of(*[name] * 40)
        scores = pool.score(samples, tolerated=2)
        asked = [score for score in scores if score.failure != NOT_ASKED]
        assert 3 <= len(asked) < 20 and all((score.failure or "").startswith("timed out") for score in asked)
        (told,) = [record.getMessage() for record in caplog.records]
        assert "timed out after 0.5 s" in told and "reward.timeout_s" in told
        with pytest.raises(
            RewardTimeout, match=rf"in time for {len(asked)} of 40 samples, {40 - len(asked)} more were not"
        ):
            check_failures(scores, samples, config_of("misbehave", max_failure_share=0.05))
        mixed = pool.score(samples_of(*["1"] * 5, name, *["2"] * 5), tolerated=2)
        assert [score.reward for score in mixed] == [1.0] * 5 + [FAILED] + [2.0] * 5
    assert len(caplog.records) == 1


def test_of_many_failures_the_first_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand lines hide everything else."""
    with caplog.at_level(logging.WARNING):
        log_failures(*batch_with(100, 101))
    assert [record.getMessage() for record in caplog.records] == [
        *[f"reward failed: sample s{number}: reason {number}" for number in range(3)],
        "reward failed: and 97 more (column reward_failure)",
    ]


def test_failures_are_logged_by_sample(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each failed sample and none for the others."""
    with caplog.at_level(logging.WARNING):
        log_failures(*batch_with(2, 5))
    assert [record.getMessage() for record in caplog.records] == [
        "reward failed: sample s0: reason 0",
        "reward failed: sample s1: reason 1",
    ]


OWNER = """
import sys
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import RewardPool
from penstock.rewards.types import Sample

if __name__ == "__main__":
    config = RewardConfig(function="reward_examples:note_worker", timeout_s=600.0, workers=2)
    with RewardPool(config, []) as pool:
        pool.score([Sample(str(k), "0", "", sys.argv[1], {}) for k in range(8)])
"""


def test_a_killed_owner_leaves_no_worker(tmp_path: Path) -> None:
    """`kill -9` of the training ends its workers too, even in a hang in C from which no Python code can run."""
    with owner_of_noted(tmp_path, OWNER, Path(__file__).parent) as (owner, notes):
        assert came_true(lambda: len(list(notes.iterdir())) == 2, 20)
        workers = [int(note.name) for note in notes.iterdir()]
        assert all(map(alive, workers))
        owner.kill()
        owner.wait()
        assert came_true(lambda: not any(map(alive, workers)), 20)
