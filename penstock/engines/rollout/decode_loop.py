"""The decode loop of a rollout engine: it steps vLLM for every generation that is under way.

Generations are submitted at any time between two steps. Before a step each may hand in requests, after it each gets
those of its own that have ended; whoever steps the loop takes the generations that have. So one loop serves single
responses and episodes, several of them at a time, and between two steps there is time for a message.

vLLM's engine core is stepped without the layer above it, which would keep a second record of every sequence (text,
log-probs, statistics) and visit it for each token; here a token costs one append.

Left out: what a generation asks for (penstock/engines/rollout/responses.py, episodes.py), the engine's memory and
weights (penstock/engines/rollout/engine.py), who steps (penstock/engines/ranks/serving/serve.py).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, Sampling
from penstock.engines.rollout import vllm as versions
from penstock.engines.rollout.prompt_queue import PromptQueue
from penstock.engines.rollout.quota import AllPrompts, Quota
from penstock.engines.rollout.routing.capture import RouteCapture
from penstock.engines.rollout.scheduler import Coasting


def _none(_: int) -> Sequence[versions.PromptImage]:
    return ()


@dataclass(frozen=True)
class Share:
    """An engine's share of a generation.

    Attributes:
        number: no other generation of this process has it; part of the requests' names, since vLLM may still hold a
            step of an earlier generation.
        prompts: all prompts of the generation.
        queue: which of them the engine answers.
        parameters: vLLM's SamplingParams of one sample; with a seed every request gets its own instead.
        room: sequences of this generation that the engine should hold at a time.
        quota: how many prompts have to be answered.
        carried: what there is of responses to the first prompts; None: nothing is kept of unfinished ones.
        ended: responses that are there already.
        images: gives those of the prompt at a position.
        engine: the number of the engine among those that share the prompts.
    """

    number: int
    prompts: Ragged
    queue: PromptQueue
    sampling: Sampling
    parameters: Any
    room: int
    quota: Quota = field(default_factory=AllPrompts)
    carried: CarriedResponses | None = None
    ended: EndedResponses | None = None
    images: Callable[[int], Sequence[versions.PromptImage]] = _none
    engine: int = 0

    @property
    def own_streams(self) -> bool:
        """Whether each request is sampled from a random stream of its own."""
        return self.parameters.seed is not None

    @property
    def all_count(self) -> bool:
        """Whether every prompt that is answered makes the batch."""
        return isinstance(self.quota, AllPrompts)


@dataclass(slots=True)
class Request:
    """What vLLM samples after one prompt: `row` is its owner's number for it."""

    owner: Generation
    row: int
    submitted: float
    tokens: array[int] = field(default_factory=partial(array, "i"))
    logprobs: list[float] = field(default_factory=list)
    version: int | None = None  # the policy version that sampled the last token; None before the first of vLLM's
    versions: list[tuple[int, int]] = field(default_factory=list)  # where another policy goes on: token, its version
    late: int = 0  # tokens of a step that had begun when weights changed, and
    late_version: int = -1  # the policy version that samples them
    prompt: int = 0  # tokens that vLLM was given
    cached: int = 0  # of those, found in the prefix cache
    truncated: bool = False
    seconds: float = 0.0  # from submission to the last token
    routes_TLK: np.ndarray | None = None  # experts that its tokens took, the prompt's too, where they are recorded

    @property
    def first_version(self) -> int:
        """The policy version that sampled the first token."""
        return self.versions[0][1]

    @property
    def last_version(self) -> int:
        """The policy version that sampled the last token."""
        return self.versions[-1][1]


class Generation(Protocol):
    """What a decode loop works on: it hands in requests and takes what has become of them."""

    def feed(self, loop: DecodeLoop) -> None:
        """Hand in the requests that there is room for; called before each step."""

    def collect(self, ended: list[Request]) -> None:
        """Take the requests that the last step has ended; called after each step, also without any."""

    @property
    def ended(self) -> bool:
        """Whether all is answered, or enough."""

    def give_up(self, requests: list[Request], tokens: int) -> None:
        """Take the requests that were under way at the end, and are no more.

        Args:
            tokens: that were sampled for them, also in a step whose tokens nobody has seen.
        """


class DecodeLoop:
    """The decode loop of one vLLM engine, or of this rank's part of one: its ranks step together.

    Args:
        llm: an idle in-process vLLM engine.
        coasting: the scheduler of its sequences that coast, if they do.
        keeps_keys: whether sequences under way keep keys and values of older weights when these change.
        capture: records the experts that tokens take.
    """

    def __init__(
        self,
        llm: Any,
        coasting: Coasting | None = None,
        keeps_keys: bool = False,
        capture: RouteCapture | None = None,
    ) -> None:
        self.llm, self._coasting, self._keeps_keys, self._capture = llm, coasting, keeps_keys, capture
        self.version = -1  # the policy version of the weights
        self.keys_of: int | None = None  # the version whose keys vLLM's prefix cache holds; None: of none, or several
        self._generations: list[Generation] = []
        self._ended: list[Generation] = []
        self._requests: dict[str, Request] = {}  # that vLLM has not ended, by name

    @property
    def busy(self) -> bool:
        """Whether a generation is under way."""
        return bool(self._generations)

    @property
    def decoding(self) -> int:
        """Requests that vLLM has not ended."""
        return len(self._requests)

    def submit(self, generation: Generation) -> None:
        """Let a generation take part from the next step on."""
        self._generations.append(generation)

    def step(self) -> None:
        """Run one step of vLLM, if there is a request, and give every generation what has ended of it.

        Raises:
            RuntimeError: vLLM gave a request up.
        """
        for generation in self._generations:
            generation.feed(self)
        ended = self._decode() if self._requests else []
        for generation in self._generations:
            generation.collect([request for request in ended if request.owner is generation])
        for generation in [generation for generation in self._generations if generation.ended]:
            self._generations.remove(generation)
            self._ended.append(generation)
            self._give_up(generation)
            if self._capture is not None:
                self._capture.finish_copies()

    def weights_changed(self, version: int) -> None:
        """Go on with the weights of another policy version.

        What vLLM keeps of the sequences that are under way is of other weights, so it is computed again from their
        tokens: the next token is the new policy's, as if that had been given all tokens before it. Where keys are kept
        the next token is the new policy's with the older ones' keys, and no other sequence finds these.
        """
        self._hear_unsent()
        if self._keeps_keys:
            for name, request in self._requests.items():
                request.late, request.late_version = versions.tokens_under_way(self.llm, name), self.version
        elif self._requests:
            versions.compute_again(self.llm)
            self.keys_of = version
        self.version = version

    @property
    def holds_keys(self) -> bool:
        """Whether vLLM's prefix cache may be used: it is of the present weights, or told apart by them."""
        return self._keeps_keys or self.keys_of == self.version

    def take(self) -> list[Generation]:
        """Return the generations that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def run(self, generation: Generation) -> None:
        """Work on a generation alone until it has ended.

        Raises:
            RuntimeError: another one is under way; as `step`.
        """
        if self.busy:
            raise RuntimeError("a generation is under way: another one that is to run alone comes after it")
        self.submit(generation)
        while self.busy:
            self.step()
        self.take()

    # ---- for generations -----------------------------------------------------------------------------------------

    def request(
        self,
        owner: Generation,
        names: dict[str, int],
        prompt: list[int],
        parameters: Any,
        seeds: list[int] | None,
        images: Sequence[versions.PromptImage] = (),
        begun_by: int | None = None,
    ) -> None:
        """Hand in requests with the same prompt, one after the other, so that its prefix is computed once.

        Args:
            names: the rows of the requests by their names, which no other request of this process has.
            seeds: of each request; None: they are sampled from the engine's common stream.
            begun_by: the policy version that sampled the first of its tokens in the prompt; None: it has none there.
        """
        salt = self._salt(self.version if begun_by is None else begun_by)
        versions.submit(self.llm, list(names), prompt, parameters, seeds, salt, images)
        now, given = time.perf_counter(), len(prompt)
        self._requests.update({name: Request(owner, row, now, prompt=given) for name, row in names.items()})

    def go_on(
        self,
        request: Request,
        name: str,
        prompt: list[int],
        parameters: Any,
        seed: int | None,
        images: Sequence[versions.PromptImage] = (),
    ) -> None:
        """Hand in a request that has tokens already: vLLM is given them behind the prompt."""
        given = [*prompt, *request.tokens]
        salt = self._salt(request.first_version if request.versions else self.version)
        versions.submit(self.llm, [name], given, parameters, None if seed is None else [seed], salt, images)
        request.prompt = len(given)
        self._requests[name] = request

    def has_room(self, unfinished: int, more: int, room: int) -> bool:
        """Whether a generation may hand in more. The same on all ranks of an engine, which step together.

        Args:
            unfinished: sequences of this generation that have not ended.
            more: sequences that would come with the next prompt.
            room: sequences that the generation should have at a time.
        """
        if not unfinished and not self._requests:
            return True
        return unfinished + more <= room and not versions.waiting_sequences(self.llm)

    def _salt(self, version: int) -> str:
        """Return what keeps prefixes apart, where those of several policies are kept: the version that began them."""
        return str(version) if self._keeps_keys else ""

    def _give_up(self, generation: Generation) -> None:
        """End what is under way of a generation that has ended."""
        if left := [name for name, request in self._requests.items() if request.owner is generation]:
            self._hear_unsent()
            requests = [self._requests.pop(name) for name in left]
            generation.give_up(requests, versions.give_up(self.llm, left))
            if self._capture is not None:
                self._capture.forget(left)

    def _decode(self) -> list[Request]:
        """Run a step of vLLM and keep its tokens; return the requests that it has ended."""
        ended, requests = [], self._requests
        for output in versions.step(self.llm):
            request = requests[output.request_id]
            if request.version is None:
                request.cached = versions.cached_prompt_tokens(output)
            self._add(request, output.new_token_ids, versions.sampled_logprobs(output))
            if output.finish_reason is not None:
                del requests[output.request_id]
                request.seconds = time.perf_counter() - request.submitted
                request.truncated = _is_truncated(output)
                if self._capture is not None:
                    request.routes_TLK = self._capture.take(output.request_id)
                ended.append(request)
        return ended

    def _hear_unsent(self) -> None:
        """Keep the tokens that are the present policy's and that the engine would send with later ones."""
        if self._coasting is not None:
            for name, (tokens, logprobs) in self._coasting.take_unsent().items():
                self._add(self._requests[name], tokens, logprobs)

    def _add(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        if request.late:
            late = min(request.late, len(tokens))
            request.late -= late
            _append(request, tokens[:late], logprobs[:late], request.late_version)
            tokens, logprobs = tokens[late:], logprobs[late:]
            if not tokens:
                return
        _append(request, tokens, logprobs, self.version)


def _append(request: Request, tokens: list[int], logprobs: list[float], version: int) -> None:
    if request.version != version:
        request.version = version
        if not request.versions or request.last_version != version:  # it goes on under the policy that began it
            request.versions.append((len(request.tokens), version))
    request.tokens.fromlist(tokens)
    request.logprobs += logprobs


def _is_truncated(output: Any) -> bool:
    reason = str(output.finish_reason)
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave request {output.request_id} up: {reason}")
    return reason == "length"
