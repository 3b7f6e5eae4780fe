"""Scores responses while others are still being generated.

What has ended is given to the source of rewards at once; `score` takes what came of it and asks for the rest. Rewards
are those of a single call at the end: a result counts for exactly the response that it is of, a failure is tried
again with the rest (the engines may have kept the processor busy), and a source that looks at several samples
together is not asked before all are there.

Left out: when responses have ended (penstock/engines/rollout/partial_results.py,
penstock/session/rollout/score_ahead.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from penstock.rewards.pool import Score
from penstock.rewards.types import Sample


class Source(Protocol):
    """What rewards come from."""

    @property
    def calls_ahead(self) -> int:
        """How many calls it takes side by side; 0 if a sample's score may depend on the others of its call."""

    def score(self, samples: Sequence[Sample], tolerated: float = inf) -> list[Score]:
        """Score every sample, in order; a failure is a value. Several threads may ask.

        Args:
            tolerated: once more samples than this have failed, the others may fail unasked.
        """


@dataclass(frozen=True)
class _Call:
    samples: Sequence[Sample]
    tolerated: float
    scores: Future[list[Score]] = field(default_factory=Future)


class Scorer:
    """Scores samples, some of them ahead: `begin` starts calls, and `score` takes their results. A context manager.

    Args:
        source: what rewards come from.
        max_failure_share: of the samples of a `score`, or of those begun together; above it the rest of them is given
            up. Those begun are then asked for once more, by the call that decides.
    """

    def __init__(self, source: Source, max_failure_share: float = 1.0) -> None:
        self._source, self._max_failure_share = source, max_failure_share
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._begun: list[_Call] = []
        self._closed, self._closing = False, threading.Lock()
        self.ahead_share = 0.0  # of the samples of the last `score`, those that had been begun and taken over

    def __enter__(self) -> Self:
        for number in range(max(1, self._source.calls_ahead)):
            # Daemons: a server that hangs must not keep the process. (An executor's threads would be waited for.)
            threading.Thread(target=self._work, name=f"scoring-{number}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            self._closed = True
            self._calls.put(None)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Begin to score samples that the next `score` will ask for, and return at once."""
        if self._source.calls_ahead and samples:
            self._begun.append(self._call(samples, self._max_failure_share * len(samples)))

    def score(self, samples: Sequence[Sample], portion_of: int | None = None) -> list[Score]:
        """Score every sample, in order; a failure is a value.

        Three sources: the calls begun earlier that are under way or done, one call now for all others, and one more at
        the end for what the begun calls failed to score. Begun calls that still wait in the queue are withdrawn.

        Args:
            portion_of: samples of a batch of which these are a portion, and others follow: what was begun of those
                goes on. None: nothing follows.

        Raises:
            UserError: the source cannot be used.
        """
        tolerated = self._max_failure_share * (portion_of or len(samples))
        wanted = None if portion_of is None else {_identity(sample) for sample in samples}
        running = self._withdraw_waiting(wanted)
        awaited = {_identity(sample) for call in running for sample in call.samples}

        asked = self._scored([sample for sample in samples if _identity(sample) not in awaited], tolerated)
        failed = sum(score.failure is not None for score in asked.values())
        ahead = _succeeded(running)
        self.ahead_share = sum(_identity(sample) in ahead for sample in samples) / max(1, len(samples))
        scores = asked | ahead
        scores |= self._scored([sample for sample in samples if _identity(sample) not in scores], tolerated - failed)
        return [scores[_identity(sample)] for sample in samples]

    def _withdraw_waiting(self, wanted: set[_Identity] | None) -> list[_Call]:
        """Return the calls begun since the last `score` that a thread has taken; the others are not made any more.

        Args:
            wanted: samples whose calls are meant; of a call that has others, too, these are kept, or begun anew.
        """
        begun, self._begun = self._begun, []
        running = []
        for call in begun:
            others = [] if wanted is None else [one for one in call.samples if _identity(one) not in wanted]
            if len(others) == len(call.samples):
                self._begun.append(call)
            elif call.scores.cancel():
                self.begin(others)
            else:
                running.append(call)
                self._begun += [call] if others else []
        return running

    def _scored(self, samples: list[Sample], tolerated: float) -> dict[_Identity, Score]:
        if not samples:
            return {}
        return dict(zip(map(_identity, samples), self._call(samples, tolerated).scores.result(), strict=True))

    def _call(self, samples: Sequence[Sample], tolerated: float) -> _Call:
        call = _Call(samples, tolerated)
        with self._closing:
            if self._closed:
                raise RuntimeError("the source of rewards is closed")
            self._calls.put(call)
        return call

    def _work(self) -> None:
        """Carry out one call after the other; once closed, give up those that have not started."""
        while (call := self._calls.get()) is not None:
            if self._closed:
                call.scores.cancel()
            if not call.scores.set_running_or_notify_cancel():
                continue
            try:
                call.scores.set_result(self._source.score(call.samples, call.tolerated))
            except Exception as error:
                call.scores.set_exception(error)
        self._calls.put(None)  # for the next thread


@dataclass(frozen=True)
class _Identity:
    """A sample may be generated twice, when an iteration is repeated, and a prompt may be drawn twice in one."""

    sample_id: str
    response: str

    def __hash__(self) -> int:
        return hash(self.sample_id)  # not of the response, all of which would be read; samples rarely share an id


def _identity(sample: Sample) -> _Identity:
    return _Identity(sample.sample_id, sample.response)


def _succeeded(running: Sequence[_Call]) -> dict[_Identity, Score]:
    """Wait for what was begun; what failed, or could not be asked at all, is left to the call that decides."""
    return {
        _identity(sample): score
        for item in running
        if item.scores.exception() is None
        for sample, score in zip(item.samples, item.scores.result(), strict=True)
        if score.failure is None
    }
