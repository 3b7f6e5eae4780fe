"""Policy losses by name. A file ``x.py`` here holds the loss ``x`` and is found by being here.

A loss takes ``PolicyLossInputs`` and keyword-only settings and returns ``PolicyLossOutputs``: one value per token.
How these become a scalar is ``penstock.algorithms.aggregation``, so a loss never averages and never sees how a batch is
split. What has to be known of a whole mini-batch (which tokens have the largest covariance) is a second function of the
file, ``choose``: it sees the mini-batch before it is split, and marks tokens. The files import torch for its types
only, or inside a function.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.algorithms.declarations.discovery import functions, modules
from penstock.algorithms.policy_losses.types import PolicyLossOutputs

PolicyLoss = Callable[..., PolicyLossOutputs]
Choice = Callable[..., np.ndarray]

MODULES = modules(__name__, __path__)
POLICY_LOSSES: dict[str, PolicyLoss] = functions(MODULES)
CHOICES: dict[str, Choice] = {name: module.choose for name, module in MODULES.items() if hasattr(module, "choose")}
