"""Drafts of a sequence's next tokens: what followed its last tokens where these stood before.

`Drafter` is what vLLM's first model runner asks after each step (`speculative_config` with a class of one's own). A
wrong draft costs time and changes no token's distribution: vLLM verifies each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NGRAM = 3  # tokens that have to agree before those that followed are drafted


class Lookup:
    """Tokens, and where each of their n-grams stood last; a token costs one entry."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # where the token stands that followed an n-gram
        self.extend(tokens)

    @property
    def last(self) -> tuple[int, ...]:
        """The last n-gram."""
        return tuple(self.tokens[-NGRAM:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            if len(self.tokens) >= NGRAM:
                self._next[self.last] = len(self.tokens)
            self.tokens.append(token)

    def after(self, ngram: tuple[int, ...], count: int) -> list[int]:
        """Return `count` tokens that followed an n-gram where it stood last; none if it did not.

        Where these reach the end they go on with themselves, so a text that repeats is drafted in full.
        """
        begin = self._next.get(ngram)
        if begin is None:
            return []
        drafted = self.tokens[begin : begin + count]
        period = len(self.tokens) - begin
        while len(drafted) < count:
            drafted.append(drafted[len(drafted) - period])
        return drafted


class Drafter:
    """Drafts for every sequence of a step from its own tokens, while there are few of them.

    Args:
        vllm_config: its `additional_config` says up to how many sequences are drafted for (`drafts_up_to`).
    """

    def __init__(self, vllm_config: Any) -> None:
        self._count: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._most: int = vllm_config.additional_config["drafts_up_to"]
        self._lookups: dict[int, Lookup] = {}  # by vLLM's place of a sequence

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self, sampled: list[list[int]], lengths_B: np.ndarray, tokens_BT: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Return the drafts of each sequence of a step; none for those that sampled nothing.

        Args:
            sampled: tokens of the step.
            lengths_B: tokens of each sequence, these included.
            tokens_BT: all tokens.
        """
        if len(sampled) > self._most:
            self._lookups.clear()
            return [[] for _ in sampled]
        return [
            self._draft(place, tokens_BT[place, : lengths_B[place]]) if tokens else []
            for place, tokens in enumerate(sampled)
        ]

    def _draft(self, place: int, tokens_T: np.ndarray) -> list[int]:
        lookup = self._lookups.get(place)
        if lookup is None or len(lookup.tokens) >= len(tokens_T):  # another sequence has the place
            lookup = self._lookups[place] = Lookup()
        lookup.extend(tokens_T[len(lookup.tokens) :].tolist())
        return lookup.after(lookup.last, min(self._count, self._longest - len(tokens_T) - 1))
