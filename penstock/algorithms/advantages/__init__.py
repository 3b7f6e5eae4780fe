"""Advantage estimators by name. A file ``x.py`` in a room here holds the estimator ``x`` and is found by being there.

A room says what its estimators look at: ``groups`` the samples of a prompt, ``critics`` a critic's values, ``returns``
a response's own return, ``selections`` which responses to imitate.
An estimator takes ``AdvantageInputs`` and keyword-only settings and returns ``Advantages``. It computes in float64
and returns float32.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.algorithms.advantages.types import Advantages
from penstock.algorithms.declarations.discovery import functions, modules

AdvantageEstimator = Callable[..., Advantages]

MODULES = modules(__name__, __path__)
ADVANTAGES: dict[str, AdvantageEstimator] = functions(MODULES)
