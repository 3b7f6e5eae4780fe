"""What engines tell of a generation while it lasts: who hears it, and what is known of it when an engine is lost.

An engine that is lost has told of most responses that it had ended. They are not generated again: the engines that are
left get all that has ended with the command for the rest, and tell of that as of their own. So whoever hears of
responses would hear of some twice; here each is handed on once.

Left out: who asks again (generation.py), responses that outlive all engines (ended.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, EngineResponses, PartialResults
from penstock.engines.groups.group import RankLost, RolloutStalled
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.carried import taken
from penstock.session.rollout.ended import EndedFile

News = Callable[[PartialResults | EngineResponses | None], None]  # takes an engine's news, or its reply


class Told:
    """What the engines have told of a generation, and will not tell again.

    Args:
        hearers: get what they tell, of each response once.
        kept: keeps the responses that have ended.
        remembers: whether `ended` will be asked for.
    """

    def __init__(
        self, request: GenerationRequest, hearers: Sequence[News], kept: EndedFile | None, remembers: bool
    ) -> None:
        self._request, self._remembers = request, remembers
        self._parts = [] if request.ended is None else [request.ended]
        self._known: set[tuple[int, int]] = set()
        self._responses = len(request.prompts) * request.sampling.samples
        self._ended, self._told_at, self._hearers, self._kept = 0, time.monotonic(), hearers, kept
        self._hearing = threading.Lock()  # each group has a thread that reads

    def hear(self, news: PartialResults | EngineResponses | None) -> None:
        """Count what an engine tells of ahead of its reply, which repeats it; of several groups one at a time."""
        with self._hearing:
            self._told_at = time.monotonic()
            if isinstance(news, PartialResults) and self._remembers:
                news = self._new_in(news)
            if isinstance(news, PartialResults):
                self._ended += len(news.ended.positions)
                if self._kept is not None:
                    self._kept.add(news.ended)
            for hear in self._hearers:
                hear(news)

    def _new_in(self, news: PartialResults) -> PartialResults:
        """Return news without what an engine that is lost has told before; remember the rest."""
        entries = list(zip(news.ended.positions.tolist(), news.ended.samples.tolist(), strict=True))
        rows_B = np.asarray([row for row, entry in enumerate(entries) if entry not in self._known], np.int64)
        self._known.update(entries)
        if len(rows_B) < len(entries):
            news = replace(news, ended=_taken(news.ended, rows_B), texts=news.texts.take(pa.array(rows_B)))
        self._parts.append(news.ended)
        return news

    def ended(self, replies: Sequence[EngineResponses | None]) -> EndedResponses | None:
        """Return all responses that have ended, also those that came with replies alone; None where none is known.

        Of episodes none is: environments know them.
        """
        if not self._remembers:
            return None
        samples = self._request.sampling.samples
        parts = [*self._parts, *(_of_reply(reply, samples) for reply in replies if reply is not None)]
        if not parts:
            return None
        return EndedResponses(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.samples for part in parts]),
            taken([part.responses for part in parts], np.arange(sum(len(part.positions) for part in parts))),
        )

    def stalled(self, loss: RankLost) -> RolloutStalled:
        """Return a missed deadline under its name."""
        ago_s, how_far = time.monotonic() - self._told_at, f"no response of {self._responses} has ended"
        if self._ended:
            how_far = f"{self._ended} of {self._responses} responses had ended, the last news {ago_s:.0f} s ago"
        return RolloutStalled(
            loss.group,
            loss.rank,
            f"{loss.reason}: {how_far}",
            loss.log_file,
            loss.log_tail,
            loss.stacks,
            loss.unheard_s,
            loss.flow_stacks,
        )


def _taken(ended: EndedResponses, rows_B: np.ndarray) -> EndedResponses:
    return EndedResponses(ended.positions[rows_B], ended.samples[rows_B], taken([ended.responses], rows_B))


def _of_reply(reply: EngineResponses, samples: int) -> EndedResponses:
    """Return a reply's responses as those that have ended."""
    tokens, asked = reply.responses, reply.logprobs_T
    versions_T = np.full(len(tokens.values_T), reply.policy_version, np.int32)
    responses = CarriedResponses(
        tokens=tokens,
        logprobs_T=np.empty(0, np.float32) if asked is None else asked,
        versions_T=versions_T if reply.versions_T is None else reply.versions_T,
        ended_B=np.ones(len(tokens), bool),
        truncated_B=reply.truncated_B,
    )
    prompts = len(reply.positions_P)
    return EndedResponses(np.repeat(reply.positions_P, samples), np.tile(np.arange(samples), prompts), responses)
