"""What a model does to the logits of its language head before they are a distribution: caps them, then scales them.

Gemma 2 caps (cap * tanh(logits / cap)), Cohere multiplies, Granite divides. By which settings a family says so is in
its row (table.py). No torch here. Left out: computing them (penstock/engines/kernels/lm_head.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.engines.families.images import of_decoder
from penstock.engines.families.table import family_of


@dataclass(frozen=True)
class LogitRule:
    """Logits are capped, if there is a `cap`, and multiplied by `factor`."""

    factor: float = 1.0
    cap: float | None = None


def logit_rule(settings: Mapping[str, Any]) -> LogitRule:
    """Return what a model with this configuration does to its logits.

    >>> logit_rule({"model_type": "granite", "logits_scaling": 8.0})
    LogitRule(factor=0.125, cap=None)
    """
    family, settings = family_of(settings.get("model_type", "")), of_decoder(settings)
    factor = prod(_given(settings, family.logit_factors)) / prod(_given(settings, family.logit_divisors))
    caps = _given(settings, family.logit_caps)
    return LogitRule(factor, min(caps) if caps else None)


def _given(settings: Mapping[str, Any], names: tuple[str, ...]) -> list[float]:
    return [float(settings[name]) for name in names if settings.get(name) is not None]
