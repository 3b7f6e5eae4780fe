"""Responses of uneven length: as long for a prompt whenever it is asked, and of the distribution that is said."""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.benchmarks.ranks import uneven_rank
from penstock.benchmarks.ranks.uneven_rank import MEAN, lengths_of
from penstock.engines.rollout.decode_loop import DecodeLoop, Request
from penstock.engines.rollout.responses import SingleResponses


def test_a_prompt_that_is_put_off_is_as_long_the_next_time() -> None:
    """Lengths follow from the prompt and the sample's number. Control: another prompt has others."""
    assert lengths_of([1, 2, 3], 8, 8192) == lengths_of([1, 2, 3], 8, 8192)
    assert lengths_of([1, 2, 3], 8, 8192)[:4] == lengths_of([1, 2, 3], 4, 8192)
    assert lengths_of([1, 2, 3], 8, 8192) != lengths_of([1, 2, 4], 8, 8192)


def test_lengths_are_log_normal_and_cut() -> None:
    """The mean before the cut, the median far below it, and none longer than allowed."""
    lengths = np.concatenate([lengths_of([prompt, 7], 8, 1_000_000) for prompt in range(8000)])
    assert lengths.mean() == pytest.approx(MEAN, rel=0.05)
    assert np.median(lengths) == pytest.approx(MEAN * np.exp(-0.5), rel=0.05)
    assert max(lengths_of([5], 4000, 1500)) == 1500


def test_uneven_requests_are_asked_like_all_others() -> None:
    """What stands in for a method of the decode loop takes what that one takes. Control: that of another does not."""

    def taken(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)[1:]

    assert taken(uneven_rank._request_unevenly) == taken(uneven_rank._request)
    assert taken(uneven_rank._go_on_unevenly) == taken(uneven_rank._go_on)
    assert taken(uneven_rank._go_on_unevenly) != taken(uneven_rank._request)


def test_vllm_is_told_where_each_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other, each with its sample's length, the recipe's own parameters left as they are.

    One that goes on ends where it would have ended. Control: without the tokens that it has it would be longer.
    """
    asked: list[tuple[list[str], int, list[int] | None]] = []

    def submit(
        llm: Any,
        names: list[str],
        prompt: object,
        parameters: Any,
        seeds: list[int] | None,
        salt: str,
        images: Any = (),
    ) -> None:
        asked.append((names, parameters.max_tokens, seeds))

    monkeypatch.setattr("penstock.engines.rollout.vllm.submit", submit)
    parameters, loop, owner = (
        SimpleNamespace(max_tokens=8192),
        DecodeLoop(None),
        cast(SingleResponses, SimpleNamespace()),
    )
    names = {"0-5-0": 0, "0-5-2": 2}
    uneven_rank._request_unevenly(loop, owner, names, [1, 2], parameters, [7, 9])
    lengths = lengths_of([1, 2], 3, 8192)
    assert asked == [(["0-5-0"], lengths[0], [7]), (["0-5-2"], lengths[2], [9])]
    assert parameters.max_tokens == 8192

    request = Request(owner, 1, 0.0, tokens=array("i", range(40)))
    rest = SimpleNamespace(max_tokens=8192 - 40)
    uneven_rank._go_on_unevenly(loop, request, "1-0-1", [1, 2], rest, 8)
    assert asked[-1] == (["1-0-1"], lengths[1] - 40, [8])
    assert rest.max_tokens == 8192 - 40
