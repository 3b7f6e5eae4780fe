"""The request loop of a rollout engine: it takes prompts while there is room, and steps vLLM until all are answered.

All samples of a prompt are submitted one after the other, so its prefix is computed once. vLLM's engine core is
stepped without the layer above it, which would keep a second record of every sequence (text, log-probs, statistics)
and visit it for each token; here a token costs one append.

Suffixes: `_P` prompts, `_B` responses.
Left out: which prompts (engines/rollout/prompt_queue.py), the engine's memory and weights (engines/rollout/engine.py),
the order of replies (penstock/session/generation.py).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engines.commands.rollout import Sampling
from engines.rollout import vllm as versions
from engines.rollout.announcing import Announcer, Ended
from engines.rollout.prompt_queue import Supply
from penstock.base.ragged import Ragged


@dataclass(frozen=True)
class Generated:
    """What one engine answered: `samples` responses side by side for each of its prompts."""

    positions_P: np.ndarray  # the prompts, in the order in which the engine took them
    responses: Ragged
    logprobs_T: np.ndarray | None  # of the responses' tokens, where they were asked for
    truncated_B: np.ndarray  # cut at max_tokens
    seconds_B: np.ndarray  # from submission to the last token
    prompt_tokens: int  # of all requests, a prompt counting once per sample
    cached_tokens: int  # of those, found in the prefix cache
    seconds: float  # from the first request to the last token


# ---- random streams ------------------------------------------------------------------------------------------------


def sample_seeds(seed: Sequence[int], position: int, samples: int) -> list[int]:
    """Return the seed of each sample of a prompt: 63 bits, mixed from the generation's numbers and the position."""
    state = np.random.SeedSequence([*seed, position]).generate_state(samples, np.uint64)
    return [int(word) >> 1 for word in state]


def engine_seed(seed: Sequence[int], engine: int) -> int:
    """Return the seed of an engine's common stream."""
    return int(np.random.SeedSequence([*seed, engine]).generate_state(1)[0])


# ---- the loop ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Response:
    row: int
    position: int
    sample: int
    submitted: float
    tokens: array[int] = field(default_factory=partial(array, "i"))
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    truncated: bool = False
    seconds: float = 0.0


def answer(
    llm: Any,
    prompts: Ragged,
    supply: Supply,
    sampling: Sampling,
    parameters: Any,
    generation: int,
    room: int,
    announcer: Announcer | None = None,
) -> Generated:
    """Answer prompts until the supply is exhausted and every response has ended.

    Args:
        llm: an idle in-process vLLM engine.
        parameters: vLLM's SamplingParams of one sample; with a seed every sample gets its own instead.
        generation: number that no other generation of this process has; part of the requests' names, since vLLM may
            still hold a step of the last generation.
        room: sequences that this engine should hold at a time.
        announcer: gets the responses that end before others.

    Raises:
        RuntimeError: vLLM gave a request up.
    """
    samples = sampling.samples
    began = time.perf_counter()
    positions: list[int] = []
    responses: list[_Response] = []
    unfinished: dict[str, _Response] = {}
    ended: list[Ended] = []
    while unfinished or not supply.exhausted:
        if not supply.exhausted and _has_room(llm, len(unfinished), samples, room):
            for position in supply.take(max(1, (room - len(unfinished)) // samples)):
                seeds = None if parameters.seed is None else sample_seeds(sampling.seed, position, samples)
                names = [f"{generation}-{position}-{sample}" for sample in range(samples)]
                versions.submit(llm, names, prompts.row(position).tolist(), parameters, seeds)
                rows = range(len(responses), len(responses) + samples)
                new = [_Response(row, position, row - rows.start, time.perf_counter()) for row in rows]
                unfinished.update(zip(names, new, strict=True))
                responses += new
                positions.append(position)
        if unfinished:
            ended += _step(llm, unfinished)
        if unfinished and announcer is not None:
            announcer.announce(ended)
    seconds = time.perf_counter() - began
    positions_P = np.asarray(positions, np.int64)
    return Generated(
        positions_P=positions_P,
        responses=Ragged.of([response.tokens for response in responses], np.int32),
        logprobs_T=_flat([response.logprobs for response in responses]) if sampling.logprobs else None,
        truncated_B=np.fromiter((response.truncated for response in responses), dtype=bool),
        seconds_B=np.fromiter((response.seconds for response in responses), dtype=np.float32),
        prompt_tokens=int(prompts.lengths_B[positions_P].sum()) * samples,
        cached_tokens=sum(response.cached for response in responses),
        seconds=seconds,
    )


def _has_room(llm: Any, unfinished: int, samples: int, room: int) -> bool:
    """Whether to take more prompts. The same on all ranks of an engine, which step together."""
    if not unfinished:
        return True
    return unfinished + samples <= room and not versions.waiting_sequences(llm)


def _step(llm: Any, unfinished: dict[str, _Response]) -> list[Ended]:
    """Run one step of vLLM and keep its tokens; what has ended leaves `unfinished` and is returned."""
    ended = []
    for output in versions.step(llm):
        response = unfinished[output.request_id]
        if not response.tokens:
            response.cached = versions.cached_prompt_tokens(output)
        response.tokens.fromlist(output.new_token_ids)
        response.logprobs += versions.sampled_logprobs(output)
        if output.finish_reason is not None:
            del unfinished[output.request_id]
            response.seconds = time.perf_counter() - response.submitted
            response.truncated = is_truncated(output)
            ended.append(Ended(response.row, response.position, response.sample, response.tokens))
    return ended


def _flat(logprobs: list[list[float]]) -> np.ndarray:
    return Ragged.of(logprobs, np.float32).values_T


def is_truncated(output: Any) -> bool:
    reason = str(output.finish_reason)
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave request {output.request_id} up: {reason}")
    return reason == "length"
