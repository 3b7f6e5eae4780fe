"""Rollout ranks without a model, for what tasks make of replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import decode, encode
from penstock.engines.commands.rollout import (
    CarriedResponses,
    EndedResponses,
    EngineResponses,
    Generate,
    PartialResults,
    Sampling,
)

GREEDY = Sampling(samples=1, temperature=0.0, top_p=1.0, top_k=0, max_tokens=2, ignore_eos=False, seed=[0, 1, 0])

NOTHING = EngineResponses(
    positions_P=np.empty(0, np.int64),
    responses=Ragged(np.empty(0, np.int32), np.zeros(1, np.int64)),
    logprobs_T=None,
    truncated_B=np.empty(0, bool),
    texts=pa.array([], pa.large_string()),
    policy_version=0,
    first_version_B=np.empty(0, np.int64),
    last_version_B=np.empty(0, np.int64),
    request_seconds_B=np.empty(0, np.float32),
    engine_seconds=0.0,
    wake_seconds=0.0,
    prompt_tokens=0,
    cached_tokens=0,
)


def ended_responses(positions: Sequence[int], samples: Sequence[int], tokens: Ragged, version: int) -> EndedResponses:
    """Responses of one policy that have ended, none of them cut."""
    logprobs_T, versions_T = -0.5 * tokens.values_T.astype(np.float32), np.full(len(tokens.values_T), version, np.int32)
    ended_B, truncated_B = np.ones(len(positions), bool), np.zeros(len(positions), bool)
    responses = CarriedResponses(tokens, logprobs_T, versions_T, ended_B, truncated_B)
    return EndedResponses(np.asarray(positions, np.int64), np.asarray(samples, np.int64), responses)


def partial_results(positions: Sequence[int], samples: Sequence[int], texts: pa.LargeStringArray) -> PartialResults:
    """News of responses of a token each."""
    tokens = Ragged.of([[7]] * len(positions), np.int32)
    return PartialResults(0, ended_responses(positions, samples, tokens, 3), texts)


@dataclass(eq=False)
class Echo:
    """Ranks that answer a prompt with its first token, once for sample 0, twice for sample 1.

    Of a generation with a quota they answer the shortest prompts, which `longest` makes long by their first tokens.
    Where responses are carried over they have sampled one more token of each of the others, and answer behind those
    that there are.
    """

    ranks: int
    policy_version: int = 3
    commands: list[dict[str, Any]] = field(default_factory=list)
    longest: tuple[int, ...] = ()

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(devices=(SimpleNamespace(gpu=None),) * self.ranks)

    def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        self.commands.append({"command": command, "key": key, **arguments})
        fields = {name: value for name, value in arguments.items() if name != "on_news"}
        asked = decode(Generate, fields, command)
        taken = np.random.default_rng(self.ranks).permutation(len(asked.prompts))
        if asked.wanted is not None:
            late = [int(asked.prompts.row(position)[0]) in self.longest for position in taken]
            taken = taken[np.argsort(late, kind="stable")][: asked.wanted]
        answers = [self.answer(asked, taken[rank :: self.ranks]) for rank in range(self.ranks)]
        if asked.carried is not None:
            others = np.setdiff1d(np.arange(len(asked.prompts)), taken)
            answers = [self.going_on(asked, answer, others[n :: self.ranks]) for n, answer in enumerate(answers)]
        return [{"reply": encode(answer), "usage": {}} for answer in answers]

    def answer(self, asked: Generate, positions: np.ndarray) -> EngineResponses:
        first = [int(asked.prompts.row(position)[0]) for position in positions]
        tokens = [[token] * (n + 1) for token in first for n in range(asked.sampling.samples)]
        responses, count = Ragged.of(tokens, np.int32), len(tokens)
        return EngineResponses(
            positions_P=positions,
            responses=responses,
            logprobs_T=None,
            truncated_B=np.arange(count) % 2 == 1,
            texts=pa.array([str(responses.row(row)[0]) for row in range(count)], pa.large_string()),
            policy_version=self.policy_version,
            first_version_B=np.full(count, self.policy_version),
            last_version_B=np.full(count, self.policy_version),
            request_seconds_B=np.ones(count, np.float32),
            engine_seconds=1.0,
            wake_seconds=0.25,
            prompt_tokens=1,
            cached_tokens=0,
        )

    def going_on(self, asked: Generate, answer: EngineResponses, others: np.ndarray) -> EngineResponses:
        """Return an answer that goes on with what is carried, and what there is of the responses to other prompts."""
        responses = [answer.responses.row(row).tolist() for row in range(len(answer.responses))]
        answered = [self.begun(asked, at, sample) for at, sample in self.samples(asked, answer.positions_P)]
        left = [self.begun(asked, at, sample) for at, sample in self.samples(asked, others)]
        more = [[int(asked.prompts.row(at)[0])] for at, _ in self.samples(asked, others)]
        return replace(
            answer,
            responses=Ragged.of([old + new for (old, _), new in zip(answered, responses, strict=True)], np.int32),
            logprobs_T=self.logprobs(asked, answered, responses) if asked.sampling.logprobs else None,
            versions_T=self.versions(answered, responses),
            left_P=others,
            left=CarriedResponses(
                tokens=Ragged.of([old + new for (old, _), new in zip(left, more, strict=True)], np.int32),
                logprobs_T=self.logprobs(asked, left, more),
                versions_T=self.versions(left, more),
                ended_B=np.zeros(len(left), bool),
                truncated_B=np.zeros(len(left), bool),
            ),
        )

    def samples(self, asked: Generate, positions: np.ndarray) -> list[tuple[int, int]]:
        return [(at, sample) for at in positions.tolist() for sample in range(asked.sampling.samples)]

    def begun(self, asked: Generate, position: int, sample: int) -> tuple[list[int], list[int]]:
        """Return the tokens that a response has and their versions."""
        carried, row = asked.carried, position * asked.sampling.samples + sample
        if carried is None or row >= len(carried.tokens):
            return [], []
        first, end = carried.tokens.offsets_B1[row : row + 2]
        return carried.tokens.row(row).tolist(), carried.versions_T[first:end].tolist()

    def versions(self, begun: list[tuple[list[int], list[int]]], more: list[list[int]]) -> np.ndarray:
        rows = [old + [self.policy_version] * len(new) for (_, old), new in zip(begun, more, strict=True)]
        return Ragged.of(rows, np.int32).values_T

    def logprobs(self, asked: Generate, begun: list[tuple[list[int], list[int]]], more: list[list[int]]) -> np.ndarray:
        """Return what no token has: minus its number; nothing unless it is asked for."""
        rows = [old + new for (old, _), new in zip(begun, more, strict=True)] if asked.sampling.logprobs else []
        return -Ragged.of(rows, np.float32).values_T
