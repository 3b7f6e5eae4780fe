"""What has ended is told a few times a second, and every text is made once."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.engines.rollout import partial_results
from penstock.engines.rollout.decode_loop import Request
from penstock.engines.rollout.partial_results import EndedResponse, PartialResultSender

RESPONSES = Ragged.of([[1], [2, 2], [3, 3, 3], [4]], np.int32)


def _request(row: int, tokens: list[int]) -> Request:
    return Request(None, row, 0.0, array("i", tokens), versions=[(0, 4)])  # type: ignore[arg-type]


def test_texts_are_told_once_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before its time, nothing when nothing has ended; the rest is decoded for the reply, in one batch."""
    clock, told, decoded = [0.0], [], []
    monkeypatch.setattr(partial_results.time, "perf_counter", lambda: clock[0])

    def decode(rows: Ragged) -> list[str]:
        decoded.append(len(rows))
        return [str(rows.row(number).tolist()) for number in range(len(rows))]

    sender = PartialResultSender(decode, told.append)
    ended = [EndedResponse(7, 0, _request(2, [3, 3, 3]))]
    sender.send(ended)
    assert (told, len(ended)) == ([], 1), "too early"

    clock[0] += partial_results.PERIOD_S
    ended.append(EndedResponse(5, 1, _request(1, [2, 2])))
    sender.send(ended)
    sender.send(ended)
    assert ended == []
    (news,) = told
    assert (news.ended.positions.tolist(), news.ended.samples.tolist()) == ([7, 5], [0, 1])
    responses = news.ended.responses
    assert responses.tokens.values_T.tolist() == [3, 3, 3, 2, 2]
    assert (responses.versions_T.tolist(), responses.ended_B.tolist()) == ([4] * 5, [True, True])
    assert news.texts.to_pylist() == ["[3, 3, 3]", "[2, 2]"]

    sender.send(last := [EndedResponse(9, 0, _request(3, [4]))], at_once=True)
    assert last == [] and told.pop().ended.positions.tolist() == [9], "whatever the time"
    decoded.pop()
    sender._texts.pop(3)

    assert sender.texts(np.arange(4), RESPONSES) == ["[1]", "[2, 2]", "[3, 3, 3]", "[4]"]
    assert decoded == [2, 2]
