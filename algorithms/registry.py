"""Every algorithm by name, collected from the files which declare one in ``ALGORITHMS``.

Importing this does not import torch, so the flow and the configs may. Settings are read off the functions'
signatures and hence cannot disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from algorithms import advantages, policy_losses
from algorithms.advantages import ADVANTAGES
from algorithms.algorithm import Algorithm, Need
from algorithms.discovery import settings
from algorithms.policy_losses import CHOICES, POLICY_LOSSES

__all__ = ["ALGORITHMS", "Algorithm", "collect", "has_ratio", "needs", "settings_of"]


def collect(modules: Iterable[ModuleType]) -> dict[str, Algorithm]:
    """The algorithms that modules declare, by name.

    Raises:
        ValueError: one name is declared twice, or a default is none of the settings.
        KeyError: a declaration names an advantage or a policy loss that no file holds.
    """
    algorithms: dict[str, Algorithm] = {}
    for module in modules:
        for declared in getattr(module, "ALGORITHMS", ()):
            if declared.name in algorithms:
                raise ValueError(f"{module.__name__} declares algorithm {declared.name!r}, which is declared already")
            if unknown := set(declared.defaults) - set(settings_of(declared.advantage, declared.policy_loss)):
                raise ValueError(f"algorithm {declared.name!r} has no setting {', '.join(sorted(unknown))}")
            algorithms[declared.name] = declared
    return algorithms


def settings_of(advantage: str, policy_loss: str) -> dict[str, Any]:
    """Settings of an estimator and a loss with their defaults; a name that both know is one setting of both."""
    choice = settings(CHOICES[policy_loss]) if policy_loss in CHOICES else {}
    return {**settings(ADVANTAGES[advantage]), **settings(POLICY_LOSSES[policy_loss]), **choice}


def needs(advantage: str, policy_loss: str) -> frozenset[Need]:
    """What an estimator and a loss need beyond rewards and the current log-probs."""
    modules = (advantages.MODULES[advantage], policy_losses.MODULES[policy_loss])
    return frozenset(need for module in modules for need in getattr(module, "NEEDS", ()))


def has_ratio(policy_loss: str) -> bool:
    """Whether a loss compares the actor with the generating policy; a file that does not says ``RATIO = False``."""
    return bool(getattr(policy_losses.MODULES[policy_loss], "RATIO", True))


ALGORITHMS: dict[str, Algorithm] = collect([*advantages.MODULES.values(), *policy_losses.MODULES.values()])
