"""A generation of single responses: it takes prompts while there is room, until all of its share are answered.

All samples of a prompt are handed in one after the other, so its prefix is computed once.

Suffixes: `_P` prompts, `_B` responses, `_T` tokens of all responses.
Left out: which prompts (engines/rollout/prompt_queue.py), stepping vLLM (engines/rollout/decode_loop.py), play with an
environment (engines/rollout/episodes.py), the order of replies (penstock/session/rollout/generation.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.rollout.decode_loop import DecodeLoop, Request, Share
from engines.rollout.partial_results import EndedResponse, PartialResultSender
from penstock.base.ragged import Ragged


@dataclass(frozen=True)
class Generated:
    """What one engine answered: `samples` responses side by side for each of its prompts."""

    positions_P: np.ndarray  # the prompts, in the order in which the engine took them
    responses: Ragged
    logprobs_T: np.ndarray | None  # of the responses' tokens, where they were asked for
    truncated_B: np.ndarray  # cut at max_tokens
    first_version_B: np.ndarray  # the policy version that sampled the first token
    last_version_B: np.ndarray  # and the last
    seconds_B: np.ndarray  # from submission to the last token
    prompt_tokens: int  # of all requests, a prompt counting once per sample
    cached_tokens: int  # of those, found in the prefix cache
    seconds: float  # from the first request to the last token


def sample_seeds(seed: Sequence[int], position: int, samples: int) -> list[int]:
    """Return the seed of each sample of a prompt: 63 bits, mixed from the generation's numbers and the position."""
    state = np.random.SeedSequence([*seed, position]).generate_state(samples, np.uint64)
    return [int(word) >> 1 for word in state]


class SingleResponses:
    """Responses of one turn each.

    Args:
        sender: gets the responses that end before others.
    """

    def __init__(self, share: Share, sender: PartialResultSender | None = None) -> None:
        self._share, self._sender = share, sender
        self._positions: list[int] = []
        self._responses: dict[int, Request] = {}  # that have ended, by row
        self._handed_in = 0
        self._untold: list[EndedResponse] = []
        self._began = time.perf_counter()
        self._seconds = 0.0

    @property
    def ended(self) -> bool:
        """Whether every response to a prompt of the share has ended."""
        return self._unfinished == 0 and self._share.queue.exhausted

    @property
    def _unfinished(self) -> int:
        return self._handed_in - len(self._responses)

    def feed(self, loop: DecodeLoop) -> None:
        """Take prompts that there is room for."""
        share, samples = self._share, self._share.sampling.samples
        if share.queue.exhausted or not loop.has_room(self._unfinished, samples, share.room):
            return
        for position in share.queue.take(max(1, (share.room - self._unfinished) // samples)):
            seeds = sample_seeds(share.sampling.seed, position, samples) if share.own_streams else None
            names = {f"{share.number}-{position}-{sample}": self._handed_in + sample for sample in range(samples)}
            loop.request(self, names, share.prompts.row(position).tolist(), share.parameters, seeds)
            self._handed_in += samples
            self._positions.append(position)

    def collect(self, ended: list[Request]) -> None:
        """Keep the responses that have ended, and let the flow be told of them while others are left."""
        self._responses.update((request.row, request) for request in ended)
        self._seconds = time.perf_counter() - self._began
        if self._sender is not None and self._unfinished:
            self._untold += map(self._ended, ended)
            self._sender.send(self._untold)

    def _ended(self, request: Request) -> EndedResponse:
        prompt, sample = divmod(request.row, self._share.sampling.samples)
        return EndedResponse(request.row, self._positions[prompt], sample, request.tokens)

    def generated(self) -> Generated:
        """Return all responses, once they have ended."""
        share, positions_P = self._share, np.asarray(self._positions, np.int64)
        responses = [self._responses[row] for row in range(self._handed_in)]
        logprobs = [response.logprobs for response in responses]
        return Generated(
            positions_P=positions_P,
            responses=Ragged.of([response.tokens for response in responses], np.int32),
            logprobs_T=Ragged.of(logprobs, np.float32).values_T if share.sampling.logprobs else None,
            truncated_B=np.fromiter((response.truncated for response in responses), dtype=bool),
            first_version_B=np.asarray([response.first_version for response in responses], np.int64),
            last_version_B=np.asarray([response.last_version for response in responses], np.int64),
            seconds_B=np.fromiter((response.seconds for response in responses), dtype=np.float32),
            prompt_tokens=int(share.prompts.lengths_B[positions_P].sum()) * share.sampling.samples,
            cached_tokens=sum(response.cached for response in responses),
            seconds=self._seconds,
        )
