"""What is scored ahead changes no reward: it counts for its own response, and failures and batches wait for the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.ahead import Scorer
from penstock.rewards.pool import Score
from penstock.rewards.server import NOT_ASKED
from penstock.rewards.source import open_scorer
from penstock.rewards.types import Sample

FAILED = -1.0


@dataclass
class Lengths:
    """A source whose scores are lengths; what is in `failing` fails, and `gate` holds every call back."""

    calls_ahead: int = 2
    failing: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    calls: list[list[str]] = field(default_factory=list)
    tolerated: list[float] = field(default_factory=list)
    refused: bool = False

    def score(self, samples: Sequence[Sample], tolerated: float = inf) -> list[Score]:
        self.calls.append([sample.response for sample in samples])
        self.tolerated.append(tolerated)
        assert self.gate.wait(20)
        if self.refused:
            raise UserError("the key is missing", "export it")
        return [
            Score(FAILED, {}, "it fails") if sample.response in self.failing else Score(len(sample.response), {}, None)
            for sample in samples
        ]


def samples_of(*responses: str) -> list[Sample]:
    return [Sample(f"000001/{number}", str(number), "?", text, {}) for number, text in enumerate(responses)]


def rewards_of(scorer: Scorer, samples: list[Sample]) -> list[float]:
    return [score.reward for score in scorer.score(samples)]


@contextmanager
def scoring(source: Lengths) -> Iterator[Scorer]:
    with Scorer(source) as scorer:
        yield scorer
        source.gate.set()


def test_what_was_begun_is_taken_and_the_rest_is_asked_for() -> None:
    """In the order of the samples, each response once."""
    source, samples = Lengths(), samples_of("a", "bb", "ccc", "dddd")
    with scoring(source) as scorer:
        source.gate.set()
        scorer.begin([samples[2]])
        scorer.begin([samples[0]])
        _wait_for(source, calls=2)
        assert rewards_of(scorer, samples) == [1, 2, 3, 4]
        assert scorer.ahead_share == 0.5
        assert sorted(map(sorted, source.calls)) == [["a"], ["bb", "dddd"], ["ccc"]]
        assert rewards_of(scorer, samples) == [1, 2, 3, 4], "a second question is answered anew"
        assert scorer.ahead_share == 0.0


def test_a_score_counts_for_its_own_response_alone() -> None:
    """An iteration that is repeated draws other responses under the same names."""
    source = Lengths()
    with scoring(source) as scorer:
        source.gate.set()
        scorer.begin(samples_of("before the engines were lost"))
        _wait_for(source, calls=1)
        assert rewards_of(scorer, samples_of("after")) == [5]


def test_responses_of_one_name_are_told_apart() -> None:
    """A prompt that is drawn twice in an iteration gives its samples the same names twice."""
    source = Lengths()
    twins = [Sample("000001/p/0", "p", "?", text, {}) for text in ("a", "bb")]
    with scoring(source) as scorer:
        source.gate.set()
        scorer.begin(twins[1:])
        _wait_for(source, calls=1)
        assert rewards_of(scorer, twins) == [1, 2]


def test_what_failed_ahead_is_tried_again() -> None:
    """The second answer counts, also where it is a failure again; a source that refuses is heard at the end."""
    source, samples = Lengths(failing={"bb", "ccc"}), samples_of("a", "bb", "ccc")
    with scoring(source) as scorer:
        source.gate.set()
        scorer.begin(samples)
        _wait_for(source, calls=1)
        scorer._begun[0].scores.result(20)
        source.failing = {"ccc"}
        assert rewards_of(scorer, samples) == [1, 2, FAILED]
        assert source.calls[1:] == [["bb", "ccc"]]
        source.refused = True
        scorer.begin(samples)
        with pytest.raises(UserError, match="the key is missing"):
            scorer.score(samples)


def test_failures_are_tolerated_as_a_share_of_all_samples() -> None:
    """Not of those that were left: and what the first call used of it the second lacks. Ahead, of each call."""
    source = Lengths(failing={"a", "ccc"})
    samples = samples_of("a", "bb", "ccc", "dddd")
    with Scorer(source, 0.5) as scorer:
        source.gate.set()
        scorer.begin(samples[2:])
        _wait_for(source, calls=1)
        assert rewards_of(scorer, samples) == [FAILED, 2, FAILED, 4]
    assert source.calls == [["ccc", "dddd"], ["a", "bb"], ["ccc"]]
    assert source.tolerated == [1.0, 2.0, 1.0]


def test_what_was_begun_for_later_portions_goes_on() -> None:
    """Each response is scored once, also where a call has some of two portions, under way or waiting for a thread.

    What may fail is a share of the whole batch. Control: without portions to come what waits is withdrawn.
    """
    source, samples = Lengths(), samples_of("a", "bb", "ccc", "dddd", "eeeee", "ffffff")
    first, second = [samples[at] for at in (0, 1, 4)], [samples[at] for at in (2, 3, 5)]
    with Scorer(source, 0.5) as scorer:
        scorer.begin([samples[0], samples[2]])
        scorer.begin([samples[1]])
        _wait_for(source, calls=2)
        scorer.begin([samples[3]])
        scorer.begin([samples[4], samples[5]])
        threading.Timer(0.2, source.gate.set).start()
        assert [score.reward for score in scorer.score(first, portion_of=6)] == [1, 2, 5]
        assert scorer.ahead_share == 2 / 3
        assert [score.reward for score in scorer.score(second)] == [3, 4, 6]
        assert scorer._begun == []
    assert sorted(response for call in source.calls for response in call) == [sample.response for sample in samples]
    assert source.tolerated[source.calls.index(["eeeee"])] == 3.0


def test_what_has_not_started_is_asked_for_together() -> None:
    """Two calls run; the third waits for a thread and is given up when everything is there."""
    source, samples = Lengths(), samples_of("a", "bb", "ccc", "dddd")
    with scoring(source) as scorer:
        for sample in samples[:3]:
            scorer.begin([sample])
        _wait_for(source, calls=2)
        threading.Timer(0.2, source.gate.set).start()
        assert rewards_of(scorer, samples) == [1, 2, 3, 4]
    assert sorted(map(sorted, source.calls)) == [["a"], ["bb"], ["ccc", "dddd"]]


def test_a_source_that_looks_at_samples_together_is_not_asked_before_all_are_there() -> None:
    source, samples = Lengths(calls_ahead=0), samples_of("a", "bb")
    with scoring(source) as scorer:
        source.gate.set()
        scorer.begin(samples[:1])
        assert rewards_of(scorer, samples) == [1, 2]
    assert source.calls == [["a", "bb"]]


MODULE = """
import os, time

def slow(response):
    while response == "slow" and not os.path.exists("released"):
        time.sleep(0.01)
    open("seen.txt", "a").write(response + "\\n")
    return float(len(response))

def pause(response):
    open("seen.txt", "a").write("begun")
    time.sleep(float(response))
    return 1.0

def hang(response):
    open("seen.txt", "a").write(response + "\\n")
    time.sleep(600)
"""


def test_reward_functions_are_called_ahead_once_per_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real workers. While a slow response keeps one busy, the others' calls end; nothing is called twice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "called_ahead.py").write_text(MODULE)
    samples = samples_of("slow", "a", "bb", "ccc", "dddd")
    config = RewardConfig(function="called_ahead:slow", workers=2, timeout_s=20)
    with open_scorer(config, []) as scorer:
        for sample in samples[:4]:
            scorer.begin([sample])
        for begun in scorer._begun[1:]:
            begun.scores.result(30)
        assert not scorer._begun[0].scores.done(), "the control: the slow one is still running"
        (tmp_path / "released").touch()
        assert rewards_of(scorer, samples) == [4, 1, 2, 3, 4]
        assert scorer.ahead_share == 0.8
    assert sorted((tmp_path / "seen.txt").read_text().split()) == ["a", "bb", "ccc", "dddd", "slow"]


@pytest.mark.parametrize("begun", [0, 40])
def test_a_function_that_hangs_is_given_up_also_where_samples_were_begun(
    begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the outcome is certain, most samples are never asked for. Control: none were begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "called_ahead.py").write_text(MODULE)
    samples = samples_of(*map(str, range(60)))
    config = RewardConfig(function="called_ahead:hang", workers=2, timeout_s=0.5, max_failure_share=0.05)
    with open_scorer(config, []) as scorer:
        for first in range(0, begun, 8):
            scorer.begin(samples[first : first + 8])
        if begun:
            _eventually((tmp_path / "seen.txt").exists)
        assert sum(score.failure == NOT_ASKED for score in scorer.score(samples)) > 40
    assert len((tmp_path / "seen.txt").read_text().split()) < 36  # with the workers, or soon to be: four of each call


@pytest.mark.parametrize("ahead", [True, False])
def test_closing_does_not_wait_for_a_slow_function(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while rewards are computed: the function would take a minute more, begun ahead or asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "called_ahead.py").write_text(MODULE)
    config = RewardConfig(function="called_ahead:pause", workers=1, timeout_s=90)
    with open_scorer(config, []) as scorer, ThreadPoolExecutor(1) as flow:
        if ahead:
            scorer.begin(samples_of("60"))
        call = flow.submit(scorer.score, samples_of("60"))
        _eventually((tmp_path / "seen.txt").exists)
        began = time.monotonic()
        scorer.__exit__(None, None, None)
        scorer._source.__exit__(None, None, None)  # type: ignore[attr-defined]  # as the context's end does both
        with pytest.raises(RuntimeError):
            call.result(30)
    assert time.monotonic() - began < 30


def _eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("not within 30 s")


def _wait_for(source: Lengths, calls: int) -> None:
    _eventually(lambda: len(source.calls) >= calls)
