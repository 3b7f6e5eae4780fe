"""Preference losses by name. A file ``x.py`` here holds the loss ``x`` and is found by being here.

A loss takes ``PairInputs`` (or ``LabelInputs``, where the file says ``LABELLED``) and keyword-only settings, and
returns ``PreferenceOutputs``: one value per pair or row. It never averages, so it never sees how a batch is split.
A file says ``REFERENCE = False`` where its loss needs no reference policy, and ``PAPER`` says where it is from. torch
is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.algorithms.declarations.discovery import functions, modules
from penstock.algorithms.preference.types import PreferenceOutputs

PreferenceLoss = Callable[..., PreferenceOutputs]

MODULES = modules(__name__, __path__)
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = functions(MODULES)
