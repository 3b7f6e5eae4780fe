"""Policy losses by name. A file ``x.py`` here holds the loss ``x`` and is found by being here.

A loss takes ``PolicyLossInputs`` and keyword-only settings and returns ``PolicyLossOutputs``: one value per token.
How these become a scalar is ``algorithms.aggregation``, so a loss never averages and never sees how a batch is split.
The files import torch for its types only, or inside a function.
"""

from __future__ import annotations

from collections.abc import Callable

from algorithms.discovery import modules
from algorithms.policy_losses.types import PolicyLossOutputs

PolicyLoss = Callable[..., PolicyLossOutputs]

MODULES = modules(__name__, __path__)
POLICY_LOSSES: dict[str, PolicyLoss] = {name: getattr(module, name) for name, module in MODULES.items()}
