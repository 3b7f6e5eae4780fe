"""A generation of single responses: it takes prompts while there is room, until all or enough of them are answered.

All samples of a prompt are handed in one after the other, so its prefix is computed once. Where responses are carried
over, those to the first prompts go on from the tokens that they have, and what is not answered in the end is told too.

Suffixes: `_P` prompts, `_B` responses, `_T` tokens of all responses.
Left out: which prompts (penstock/engines/rollout/prompt_queue.py), stepping vLLM
(penstock/engines/rollout/decode_loop.py), play with an environment (penstock/engines/rollout/episodes.py), the order of
replies (penstock/session/rollout/generation.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses
from penstock.engines.rollout.carried import carried_of, request_of, versions_of
from penstock.engines.rollout.decode_loop import DecodeLoop, Request, Share
from penstock.engines.rollout.partial_results import EndedResponse, PartialResultSender


@dataclass(frozen=True)
class Left:
    """What one engine has begun and not answered, where responses are carried over."""

    positions_P: np.ndarray  # its prompts
    responses: CarriedResponses


@dataclass(frozen=True)
class Generated:
    """What one engine answered: `samples` responses side by side for each of its prompts."""

    positions_P: np.ndarray  # the prompts, in the order in which the engine took them
    rows_B: np.ndarray  # of the responses, among all that the engine began
    responses: Ragged
    logprobs_T: np.ndarray | None  # of the responses' tokens, where they were asked for
    truncated_B: np.ndarray  # cut at max_tokens
    first_version_B: np.ndarray  # the policy version that sampled the first token
    last_version_B: np.ndarray  # and the last
    seconds_B: np.ndarray  # from submission to the last token
    prompt_tokens: int  # of all requests, a prompt counting once per sample
    cached_tokens: int  # of those, found in the prefix cache
    seconds: float  # from the first request to the last token
    unused_tokens: int  # sampled in vain, since a quota was reached before
    versions_T: np.ndarray | None  # where responses are carried over: the policy version that sampled each token,
    left: Left | None  # and what was begun and not answered
    routes: Ragged | None  # experts of each token, of the prompts too, layer after layer, where asked for


def sample_seeds(seed: Sequence[int], position: int, samples: int) -> list[int]:
    """Return the seed of each sample of a prompt: 63 bits, mixed from the generation's numbers and the position."""
    state = np.random.SeedSequence([*seed, position]).generate_state(samples, np.uint64)
    return [int(word) >> 1 for word in state]


def _routes(responses: Sequence[Request]) -> Ragged:
    routes = [response.routes_TLK.ravel() for response in responses if response.routes_TLK is not None]
    return Ragged.of(routes, routes[0].dtype if routes else np.uint8)  # an engine may have answered nothing


def _places(share: Share) -> dict[tuple[int, int], int]:
    """Return where the responses are that are there already, by prompt and sample."""
    if share.ended is None:
        return {}
    entries = zip(share.ended.positions.tolist(), share.ended.samples.tolist(), strict=True)
    return {entry: place for place, entry in enumerate(entries)}


class SingleResponses:
    """Responses of one turn each.

    Args:
        sender: gets the responses that end before others.
    """

    def __init__(self, share: Share, sender: PartialResultSender | None = None) -> None:
        self._share, self._sender = share, sender
        self._positions: list[int] = []
        self._left: list[int] = []  # of each prompt, the responses that have not ended
        self._answered: list[int] = []  # prompts that count, by their number among those taken
        self._responses: dict[int, Request] = {}  # that have ended, by row
        self._ended_before: list[Request] = []  # in an earlier generation
        self._there_before = _places(share)
        self._open: list[Request] = []  # that were under way at the end
        self._given_up = 0  # tokens
        self._handed_in = 0
        self._untold: list[EndedResponse] = []
        self._untold_counted: list[int] | None = None if share.all_count else []
        self._began = time.perf_counter()
        self._seconds = 0.0

    @property
    def ended(self) -> bool:
        """Whether every response to a prompt of the share has ended, or to enough prompts."""
        return self._share.quota.reached or (self._unfinished == 0 and self._share.queue.exhausted)

    @property
    def _unfinished(self) -> int:
        return self._handed_in - len(self._responses)

    def feed(self, loop: DecodeLoop) -> None:
        """Take prompts that there is room for."""
        share, samples = self._share, self._share.sampling.samples
        if share.queue.exhausted or not loop.has_room(self._unfinished, samples, share.room):
            return
        for position in share.queue.take(max(1, (share.room - self._unfinished) // samples)):
            self._hand_in(loop, position)
            self._handed_in += samples
            self._positions.append(position)
            self._left.append(samples)

    def _hand_in(self, loop: DecodeLoop, position: int) -> None:
        """Hand in the responses to a prompt, but for those that are there already."""
        share, samples = self._share, self._share.sampling.samples
        missing = [sample for sample in range(samples) if not self._take_over(position, sample)]
        seeds = None
        if share.own_streams:
            of_all = sample_seeds(share.sampling.seed, position, samples)
            seeds = [of_all[sample] for sample in missing]
        names = {f"{share.number}-{position}-{sample}": self._handed_in + sample for sample in missing}
        if share.carried is not None and position * samples < len(share.carried.tokens):
            self._go_on(loop, position, names, seeds)
        elif names:
            prompt, images = share.prompts.row(position).tolist(), share.images(position)
            loop.request(self, names, prompt, share.parameters, seeds, images)

    def _take_over(self, position: int, sample: int) -> bool:
        """Keep a response that is there already; return whether it is."""
        place = self._there_before.get((position, sample))
        if place is None or self._share.ended is None:
            return False
        self._ended_before.append(request_of(self._share.ended.responses, place, self, self._handed_in + sample))
        return True

    def _go_on(self, loop: DecodeLoop, position: int, names: dict[str, int], seeds: list[int] | None) -> None:
        """Hand in what is missing of a prompt's responses."""
        share, carried, samples = self._share, self._share.carried, self._share.sampling.samples
        assert carried is not None
        own: list[int | None] = [None] * len(names) if seeds is None else [*seeds]
        for (name, row), seed in zip(names.items(), own, strict=True):
            number = position * samples + row - self._handed_in
            request = request_of(carried, number, self, row)
            if carried.ended_B[number]:
                self._ended_before.append(request)
                continue
            parameters = copy.copy(share.parameters)
            parameters.max_tokens = share.sampling.max_tokens - len(request.tokens)
            loop.go_on(request, name, share.prompts.row(position).tolist(), parameters, seed, share.images(position))

    def collect(self, ended: list[Request]) -> None:
        """Keep the responses that have ended, and let the flow be told of them while others are left."""
        ended, self._ended_before = [*self._ended_before, *ended], []
        self._responses.update((request.row, request) for request in ended)
        self._seconds = time.perf_counter() - self._began
        counted = self._count(ended)
        if self._sender is None or (self.ended and not self._sender.tells_all):
            return
        self._untold += map(self._ended, ended)
        if self._untold_counted is not None:
            self._untold_counted += [self._positions[prompt] for prompt in counted]
        self._sender.send(self._untold, at_once=self.ended, counted=self._untold_counted)

    def give_up(self, requests: list[Request], tokens: int) -> None:
        """Keep what there is, where responses are carried over; remember how much was sampled in vain."""
        self._given_up = tokens
        if self._share.carried is not None:
            self._open = requests
            self._given_up -= sum(map(self._sampled, requests))

    def _sampled(self, request: Request) -> int:
        """Return how many of a request's tokens this generation has sampled."""
        position = self._positions[request.row // self._share.sampling.samples]
        return len(request.tokens) + int(self._share.prompts.lengths_B[position]) - request.prompt

    def _count(self, ended: list[Request]) -> list[int]:
        """Count the prompts of which the last responses have ended; return those that count."""
        complete = []
        for request in ended:
            prompt = request.row // self._share.sampling.samples
            self._left[prompt] -= 1
            if not self._left[prompt]:
                complete.append(prompt)
        number_at = {self._positions[prompt]: prompt for prompt in sorted(complete)}
        counted = [number_at[position] for position in self._share.quota.count(list(number_at))]
        self._answered += counted
        return counted

    def _ended(self, request: Request) -> EndedResponse:
        prompt, sample = divmod(request.row, self._share.sampling.samples)
        return EndedResponse(self._positions[prompt], sample, request)

    def generated(self) -> Generated:
        """Return all responses that count, once the generation has ended."""
        share, samples = self._share, self._share.sampling.samples
        answered_P = np.asarray(sorted(self._answered), np.int64)
        rows_B = (answered_P[:, None] * samples + np.arange(samples)).ravel()
        positions_P = np.asarray(self._positions, np.int64)[answered_P]
        responses = [self._responses[row] for row in rows_B.tolist()]
        logprobs = [response.logprobs for response in responses]
        tokens = Ragged.of([response.tokens for response in responses], np.int32)
        return Generated(
            positions_P=positions_P,
            rows_B=rows_B,
            responses=tokens,
            logprobs_T=Ragged.of(logprobs, np.float32).values_T if share.sampling.logprobs else None,
            truncated_B=np.fromiter((response.truncated for response in responses), dtype=bool),
            first_version_B=np.asarray([response.first_version for response in responses], np.int64),
            last_version_B=np.asarray([response.last_version for response in responses], np.int64),
            seconds_B=np.fromiter((response.seconds for response in responses), dtype=np.float32),
            prompt_tokens=sum(response.prompt for response in responses),
            cached_tokens=sum(response.cached for response in responses),
            seconds=self._seconds,
            unused_tokens=self._given_up + (0 if share.carried is not None else self._sampled_too_many(tokens)),
            versions_T=versions_of(responses) if share.carried is not None else None,
            left=self._left_over() if share.carried is not None else None,
            routes=_routes(responses) if share.sampling.routes else None,
        )

    def _sampled_too_many(self, used: Ragged) -> int:
        """Return how many tokens are in responses that have ended and do not count."""
        return sum(len(response.tokens) for response in self._responses.values()) - len(used.values_T)

    def _left_over(self) -> Left:
        """Return what was begun and does not count."""
        samples, answered = self._share.sampling.samples, set(self._answered)
        unanswered = [prompt for prompt in range(len(self._positions)) if prompt not in answered]
        under_way = {request.row: request for request in self._open}
        rows = [prompt * samples + sample for prompt in unanswered for sample in range(samples)]
        ended = [row in self._responses for row in rows]
        requests = [self._responses[row] if row in self._responses else under_way[row] for row in rows]
        positions_P = np.asarray([self._positions[prompt] for prompt in unanswered], np.int64)
        return Left(positions_P, carried_of(requests, ended, self._share.engine))
