"""Preference losses by name. A file ``x.py`` here holds the loss ``x`` and is found by being here.

A loss takes ``PairInputs`` (or ``LabelInputs``, where the file says ``LABELLED``) and keyword-only settings, and
returns ``PreferenceOutputs``: one value per pair or row. It never averages, so it never sees how a batch is split.
A file says ``REFERENCE = False`` where its loss needs no reference policy. torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable

from algorithms.declarations.discovery import modules
from algorithms.preference.types import PreferenceOutputs

PreferenceLoss = Callable[..., PreferenceOutputs]

MODULES = modules(__name__, __path__)
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {name: getattr(module, name) for name, module in MODULES.items()}


def is_labelled(name: str) -> bool:
    """Whether a loss takes rows that are good or bad by themselves instead of pairs."""
    return bool(getattr(MODULES[name], "LABELLED", False))


def needs_reference(name: str) -> bool:
    """Whether a loss needs log-probs of the model that training started from."""
    return bool(getattr(MODULES[name], "REFERENCE", True))
