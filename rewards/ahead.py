"""Scores responses while others are still being generated.

What has ended is given to the source of rewards at once; `score` takes what came of it and asks for the rest. Rewards
are those of a single call at the end: a result counts for exactly the response that it is of, a failure is tried
again with the rest (the engines may have kept the processor busy), and a source that looks at several samples
together is not asked before all are there.

Left out: when responses have ended (engines/announcing.py, tasks/score_ahead.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rewards.scoring import Sample, Score


class Source(Protocol):
    """What rewards come from."""

    @property
    def calls_ahead(self) -> int:
        """How many calls it takes side by side; 0 if a sample's score may depend on the others of its call."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score every sample, in order; a failure is a value. Several threads may ask."""


@dataclass(frozen=True)
class _Begun:
    samples: Sequence[Sample]
    scores: Future[list[Score]]


class Scorer:
    """Gives every sample its worth, of those begun earlier as soon as `score` is asked; a context manager."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._threads = ThreadPoolExecutor(max(1, source.calls_ahead), thread_name_prefix="scoring")
        self._begun: list[_Begun] = []
        self.ahead_share = 0.0  # of the samples of the last `score`, those that had been begun and taken over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)  # the source, which ends next, ends what still runs

    def begin(self, samples: Sequence[Sample]) -> None:
        """Begin to score samples that the next `score` will ask for, and return at once."""
        if self._source.calls_ahead and samples:
            self._begun.append(_Begun(samples, self._threads.submit(self._source.score, samples)))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score every sample, in order; a failure is a value.

        Raises:
            UserError: the source cannot be used.
        """
        begun, self._begun = self._begun, []
        running = [item for item in begun if not item.scores.cancel()]
        expected = {_identity(sample) for item in running for sample in item.samples}
        found = self._scored([sample for sample in samples if _identity(sample) not in expected])
        ahead = _succeeded(running)
        self.ahead_share = sum(_identity(sample) in ahead for sample in samples) / max(1, len(samples))
        found |= ahead
        found |= self._scored([sample for sample in samples if _identity(sample) not in found])
        return [found[_identity(sample)] for sample in samples]

    def _scored(self, samples: list[Sample]) -> dict[tuple[str, str], Score]:
        if not samples:
            return {}
        scores = self._threads.submit(self._source.score, samples).result()
        return dict(zip(map(_identity, samples), scores, strict=True))


def _identity(sample: Sample) -> tuple[str, str]:
    """A sample may be generated twice, when an iteration is repeated, and a prompt may be drawn twice in one."""
    return sample.sample_id, sample.response


def _succeeded(running: Sequence[_Begun]) -> dict[tuple[str, str], Score]:
    """Wait for what was begun; what failed, or could not be asked at all, is left to the call that decides."""
    return {
        _identity(sample): score
        for item in running
        if item.scores.exception() is None
        for sample, score in zip(item.samples, item.scores.result(), strict=True)
        if score.failure is None
    }
