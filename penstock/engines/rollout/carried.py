"""Responses that are carried over: what one generation leaves of them becomes requests of the next, and back.

Each token keeps its log-prob and the version of the policy that sampled it. A response that has ended is carried as
well, until all of its prompt's have.

Suffix: `_T` tokens of all responses.
Left out: when a generation leaves responses (penstock/engines/rollout/quota.py), how the next goes on with them
(penstock/engines/rollout/responses.py), where they wait (penstock/session/rollout/carried.py).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import NO_ENGINE, CarriedResponses
from penstock.engines.rollout.decode_loop import Generation, Request


def request_of(carried: CarriedResponses, number: int, owner: Generation, row: int) -> Request:
    """Return a carried response as a request that has tokens already.

    Args:
        number: of the response among those carried.
        owner: who goes on with it, for whom it is `row`.
    """
    first, end = carried.tokens.offsets_B1[number : number + 2]
    return Request(
        owner,
        row,
        time.perf_counter(),
        tokens=array("i", carried.tokens.row(number).tolist()),
        logprobs=carried.logprobs_T[first:end].tolist(),
        versions=spans_of(carried.versions_T[first:end].tolist()),
        truncated=bool(carried.truncated_B[number]),
    )


def spans_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return from which token on which policy version sampled."""
    begins = np.flatnonzero(np.diff(np.asarray(versions), prepend=-2)).tolist()
    return [(begin, versions[begin]) for begin in begins]


def resumed(before: Request, owner: Generation, row: int) -> Request:
    """Return what a generation has left of a request as one of another, for which it is `row`."""
    known = before.tokens[:], before.logprobs[:]
    return Request(owner, row, time.perf_counter(), *known, versions=before.versions[:])


def carried_of(requests: Sequence[Request], ended: Sequence[bool], engine: int | None = None) -> CarriedResponses:
    """Return what there is of requests, for a later generation to go on with.

    Args:
        engine: that has answered them; None: no one asks.
    """
    return CarriedResponses(
        tokens=Ragged.of([request.tokens for request in requests], np.int32),
        logprobs_T=Ragged.of([request.logprobs for request in requests], np.float32).values_T,
        versions_T=versions_of(requests),
        ended_B=np.asarray(ended, bool),
        truncated_B=np.asarray([request.truncated for request in requests], bool),
        engines_B=None if engine is None else homes_of_unended(ended, engine),
    )


def homes_of_unended(ended: Sequence[bool], engine: int) -> np.ndarray:
    """Return for each response the engine that has what lives of it, int32: nothing does of one that has ended."""
    return np.where(ended, NO_ENGINE, engine).astype(np.int32)


def homes_of(carried: CarriedResponses | None, samples: int) -> np.ndarray | None:
    """Return for each carried prompt the engine that has what lives of its responses, int32; None: nobody knows."""
    if carried is None or carried.engines_B is None:
        return None
    homes_P: np.ndarray = carried.engines_B.reshape(-1, samples).max(axis=1)
    return homes_P


def versions_of(requests: Sequence[Request]) -> np.ndarray:
    """Return the policy version that sampled each token of all requests, int32."""
    versions: list[int] = []
    lengths: list[int] = []
    for request in requests:
        begins = [begin for begin, _ in request.versions]
        versions += [version for _, version in request.versions]
        lengths += np.diff([*begins, len(request.tokens)]).tolist() if begins else []
    return np.repeat(np.asarray(versions, np.int32), np.asarray(lengths, np.int64))
