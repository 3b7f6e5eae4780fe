"""Responses that have ended are told to the flow while others are still generated.

So their rewards can begin, and nobody has to generate them again if the generation is cut off. A few times a second,
all that has ended since, and the text of each, decoded once, also for the reply. Left out: what the
flow does with them (penstock/session/rollout/score_ahead.py, portions.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, PartialResults
from penstock.engines.rollout.carried import carried_of
from penstock.engines.rollout.decode_loop import Request
from penstock.engines.rollout.episode import Episode

PERIOD_S = 0.1
Gather = Callable[[Sequence[Any]], CarriedResponses]


@dataclass(frozen=True)
class EndedResponse:
    """A response, or an episode, that has ended, `sample` among those of the prompt at `position`."""

    position: int
    sample: int
    request: Request | Episode

    @property
    def row(self) -> int:
        """Its row among all of the engine."""
        return self.request.row


def _of_requests(ended: Sequence[Request]) -> CarriedResponses:
    return carried_of(ended, [True] * len(ended))


class PartialResultSender:
    """Tells the flow which of one generation's responses have ended.

    Args:
        decode: returns the text of each row.
        tell: takes what has ended.
        engine: number of the engine that generates.
        tells_all: whether it tells of those that end last, too.
    """

    def __init__(
        self,
        decode: Callable[[Ragged], list[str]],
        tell: Callable[[PartialResults], None],
        engine: int = 0,
        tells_all: bool = False,
    ) -> None:
        self._decode, self._tell, self._engine, self.tells_all = decode, tell, engine, tells_all
        self._texts: dict[int, str] = {}
        self._told = time.perf_counter()

    def send(
        self,
        ended: list[EndedResponse],
        at_once: bool = False,
        gather: Gather = _of_requests,
        counted: list[int] | None = None,
    ) -> None:
        """Tell what has ended, and empty the lists, if it is time to.

        Args:
            gather: makes one of the responses, or of the episodes.
            counted: positions of prompts that have been found to make the batch; None: all do.
        """
        if not ended or (time.perf_counter() < self._told + PERIOD_S and not at_once):
            return
        responses = gather([item.request for item in ended])
        positions, samples = zip(*((item.position, item.sample) for item in ended), strict=True)
        texts = self._decode(responses.tokens)
        self._texts.update(zip((item.row for item in ended), texts, strict=True))
        told = EndedResponses(np.asarray(positions, np.int64), np.asarray(samples, np.int64), responses)
        now_counted = None if counted is None else [*counted]
        self._tell(PartialResults(self._engine, told, pa.array(texts, pa.large_string()), now_counted))
        self._told = time.perf_counter()
        ended.clear()
        if counted is not None:
            counted.clear()

    def texts(self, rows_B: np.ndarray, responses: Ragged) -> list[str]:
        """Return the text of every response.

        Args:
            rows_B: theirs among all of the engine.
        """
        rows = rows_B.tolist()
        left_B = np.asarray([place for place, row in enumerate(rows) if row not in self._texts], np.int64)
        self._texts.update(zip(rows_B[left_B].tolist(), self._decode(responses.take(left_B)), strict=True))
        return [self._texts[row] for row in rows]
