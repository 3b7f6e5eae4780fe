"""How long a row may be so that the trainer and the rollout engine compute the same for it, whatever its company.

LongRoPE (arXiv 2402.13753) has two tables of rotary frequencies. Transformers takes the second where the longest row of
a call exceeds a length, vLLM where the longest that it may meet does; up to that length both take the first. And of
Cohere 2 both read the size of the sliding window otherwise: a token sees one key more in vLLM. So far such a model is
trained, and no further. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engines.families.images import of_decoder
from penstock.engines.families.table import family_of

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class LongestRow:
    """A number of tokens, and what is otherwise beyond it, as a message says it."""

    tokens: int
    beyond: str


def longest_row(settings: Mapping[str, Any]) -> LongestRow | None:
    """Return how long a row may be; None: as long as the model itself allows.

    Raises:
        KeyError: the configuration does not say up to where the first table goes.
    """
    family, settings = family_of(settings.get("model_type", "")), of_decoder(settings)
    if not rope_types(settings).isdisjoint(family.positions_in_two):
        named = [rope[ORIGINAL] for rope in _ropes(settings) if ORIGINAL in rope]
        return LongestRow(int(named[0] if named else settings[ORIGINAL]), "it has other positions (LongRoPE)")
    if family.disputed_window and settings.get("sliding_window"):
        return LongestRow(
            int(settings["sliding_window"]), "vLLM's sliding window is one token longer than the trainer's"
        )
    return None


def rope_types(settings: Mapping[str, Any]) -> set[str]:
    """Return the types of a model's rotary positions."""
    return {str(rope.get(key)) for rope in _ropes(settings) for key in ("rope_type", "type")}


def _ropes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions, of all layers or by their type, as new and as old files say them."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = settings.get(name) or {}
        yield from (rope, *(part for part in rope.values() if isinstance(part, Mapping)))
