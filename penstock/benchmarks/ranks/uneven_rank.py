"""The rank of `penstock bench waiting --lognormal`: the real one, whose responses are as uneven as a reasoning model's.

A model with random weights ends no response, so vLLM is told where each one ends. That follows from the prompt and the
number of the sample alone: one that is put off is as long when it is asked again, or goes on to where it would have
ended. Left out: who starts such ranks (uneven_training.py), what is measured (penstock/benchmarks/waiting.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.benchmarks.workload.experience import SIGMA
from penstock.engines.ranks.worker import Worker
from penstock.engines.rollout.decode_loop import DecodeLoop, Generation, Request
from penstock.engines.rollout.vllm import PromptImage

MEAN = 600  # tokens of a response, before the longest are cut
_request, _go_on = DecodeLoop.request, DecodeLoop.go_on


class UnevenWorker(Worker):
    """A `Worker` whose rollout engine ends responses where `lengths_of` says."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(rank, world_size, gpu)
        for name, uneven in (("request", _request_unevenly), ("go_on", _go_on_unevenly)):
            setattr(DecodeLoop, name, uneven)


def lengths_of(prompt: list[int], samples: int, longest: int) -> list[int]:
    """Return the log-normal lengths of a prompt's responses, which depend on its tokens alone, cut at `longest`."""
    drawn_B = np.random.default_rng(prompt).lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, samples)
    lengths: list[int] = np.clip(np.rint(drawn_B), 1, longest).astype(int).tolist()
    return lengths


def _request_unevenly(
    loop: DecodeLoop,
    owner: Generation,
    names: dict[str, int],
    prompt: list[int],
    parameters: Any,
    seeds: list[int] | None,
    images: Sequence[PromptImage] = (),
    begun_by: int | None = None,
) -> None:
    for number, (name, row) in enumerate(names.items()):
        sample, own_seed = int(name.rpartition("-")[2]), None if seeds is None else seeds[number : number + 1]
        own = _as_long(parameters, lengths_of(prompt, sample + 1, parameters.max_tokens)[sample])
        _request(loop, owner, {name: row}, prompt, own, own_seed, images, begun_by)


def _go_on_unevenly(
    loop: DecodeLoop,
    request: Request,
    name: str,
    prompt: list[int],
    parameters: Any,
    seed: int | None,
    images: Sequence[PromptImage] = (),
) -> None:
    sample, sampled = int(name.rpartition("-")[2]), len(request.tokens)
    length = lengths_of(prompt, sample + 1, parameters.max_tokens + sampled)[sample]
    _go_on(loop, request, name, prompt, _as_long(parameters, length - sampled), seed, images)


def _as_long(parameters: Any, tokens: int) -> Any:
    own = copy.copy(parameters)
    own.max_tokens = tokens
    return own
