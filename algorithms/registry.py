"""Every algorithm by name, collected from the files which declare one as ``ALGORITHM``.

Importing this does not import torch, so the flow and the configs may. Settings are read off the functions'
signatures and hence cannot disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

from algorithms import advantages, policy_losses
from algorithms.advantages import ADVANTAGES
from algorithms.algorithm import Algorithm
from algorithms.discovery import settings
from algorithms.policy_losses import POLICY_LOSSES

__all__ = ["ALGORITHMS", "Algorithm", "collect"]


def collect(modules: Iterable[ModuleType]) -> dict[str, Algorithm]:
    """The algorithms that modules declare, by name, with their settings filled in.

    Raises:
        ValueError: two modules declare one name.
        KeyError: a declaration names an advantage or a policy loss that no file holds.
    """
    algorithms: dict[str, Algorithm] = {}
    for module in modules:
        declared = getattr(module, "ALGORITHM", None)
        if declared is None:
            continue
        if declared.name in algorithms:
            raise ValueError(f"{module.__name__} declares algorithm {declared.name!r}, which another file declares too")
        algorithms[declared.name] = replace(
            declared,
            advantage_settings=settings(ADVANTAGES[declared.advantage]),
            loss_settings=settings(POLICY_LOSSES[declared.policy_loss]),
        )
    return algorithms


ALGORITHMS: dict[str, Algorithm] = collect([*advantages.MODULES.values(), *policy_losses.MODULES.values()])
