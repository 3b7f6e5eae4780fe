"""What engines tell of a generation is handed on once, and is known when one of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import PartialResults
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.told import Told
from tests.echo import GREEDY, NOTHING, ended_responses

SAMPLES = 2
REQUEST = GenerationRequest(
    pd.DataFrame({"prompt_tokens": [[1], [2], [3]]}), "1/rollout", replace(GREEDY, samples=SAMPLES)
)


def news(*entries: tuple[int, int], version: int = 3) -> PartialResults:
    """Responses to prompts, by position and sample; of each the tokens say which it is."""
    positions, samples = zip(*entries, strict=True)
    tokens = Ragged.of([[10 * position + sample] * (1 + sample) for position, sample in entries], np.int32)
    texts = pa.array([f"{position}-{sample}" for position, sample in entries], pa.large_string())
    return PartialResults(0, ended_responses(positions, samples, tokens, version), texts)


def entries(ended: Any) -> list[tuple[int, int, list[int]]]:
    """What has ended: position, sample and tokens."""
    tokens = [ended.responses.tokens.row(row).tolist() for row in range(len(ended.positions))]
    return list(zip(ended.positions.tolist(), ended.samples.tolist(), tokens, strict=True))


def test_of_each_response_is_heard_once() -> None:
    """Engines that go on for a lost one tell of what it had told. Control: else all is handed on as it comes."""
    heard: list[PartialResults] = []
    told = Told(REQUEST, [heard.append], None, remembers=True)  # type: ignore[list-item]
    told.hear(news((0, 0), (0, 1)))
    told.hear(news((0, 1), (1, 0)))
    assert [one.texts.to_pylist() for one in heard] == [["0-0", "0-1"], ["1-0"]]
    assert entries(heard[1].ended) == [(1, 0, [10])]
    assert len(heard[1].ended.responses.logprobs_T) == 1

    every: list[PartialResults] = []
    told = Told(REQUEST, [every.append], None, remembers=False)  # type: ignore[list-item]
    told.hear(news((0, 0)))
    told.hear(news((0, 0)))
    assert len(every) == 2 and told.ended([]) is None


def test_engines_of_several_groups_are_heard_one_at_a_time() -> None:
    """Each group has a thread that reads, and who hears keeps files and lists. Control: else two would overlap."""
    met: list[bool] = []

    def meeting(within_s: float) -> Callable[[Any], None]:
        both = Barrier(2)

        def meet(_: Any) -> None:
            try:
                both.wait(within_s)
                met.append(True)
            except BrokenBarrierError:
                met.append(False)

        return meet

    told = Told(REQUEST, [meeting(0.2)], None, remembers=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(told.hear, [news((0, 0)), news((1, 0))]))
        assert met == [False, False]
        list(pool.map(meeting(20.0), range(2)))
    assert met[2:] == [True, True]


def test_all_that_has_ended_goes_to_the_engines_that_are_left() -> None:
    """What was there before, what was told, and what only a reply brought, with the version that sampled it."""
    before = replace(REQUEST, ended=news((2, 1), version=1).ended)
    told = Told(before, [], None, remembers=True)
    told.hear(news((0, 0)))
    reply = replace(
        NOTHING,
        positions_P=np.array([1]),
        responses=Ragged.of([[10], [11, 11]], np.int32),
        logprobs_T=np.full(3, -0.5, np.float32),
        truncated_B=np.array([False, True]),
        policy_version=3,
    )
    ended = told.ended([reply, None])
    assert ended is not None
    assert entries(ended) == [(2, 1, [21, 21]), (0, 0, [0]), (1, 0, [10]), (1, 1, [11, 11])]
    assert ended.responses.versions_T.tolist() == [1, 1, 3, 3, 3, 3]
    assert ended.responses.truncated_B.tolist() == [False, False, False, True]
    assert ended.responses.ended_B.all()
    assert Told(REQUEST, [], None, remembers=True).ended([]) is None
