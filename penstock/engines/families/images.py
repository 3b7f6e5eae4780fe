"""Models that see: an encoder makes vectors of images, and a decoder reads them in place of the embeddings of tokens.

Their configuration has one of the decoder inside (files on the Hub have its settings beside the others), and it is the
decoder that all else here is about: sizes, positions, logits. No torch here. Left out: the encoder's sizes, which
count as parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.families.table import family_of


def of_decoder(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a model's decoder, under the whole model's type; those of a model without images as is."""
    if not sees(settings):
        return settings
    return {**settings, **(settings.get("text_config") or {}), "model_type": settings["model_type"]}


def sees(settings: Mapping[str, Any]) -> bool:
    """Whether a model with this configuration has an encoder of images that is known here."""
    return bool(family_of(settings.get("model_type", "")).encoder)
