"""Independent PPO: agents share the policy, and each has a critic of its own.

Source: de Witt et al. 2020 (arXiv 2011.09533), section 3: every agent runs PPO on what it observes itself, with values
of its own instead of a central critic's; parameters of the policy are shared. Here a row is what one agent observes
and says, so values come from the critic of the row's agent, and advantages are normalised among its rows alone: one
agent's rewards, however large, change nothing of another's advantages.

Shapes: _T flat response tokens, _C the counted tokens among them, _B rows, _B1 offsets (B + 1).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from penstock.algorithms.advantages.critics.gae import generalised
from penstock.algorithms.advantages.types import AdvantageInputs, Advantages
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.normalization import whitened
from penstock.algorithms.segments import lengths

NEEDS: tuple[Need, ...] = ("critic", "agent")

SEPARABLE = "whiten"  # as long as this setting is off

ALGORITHMS = (
    Algorithm(
        name="ippo",
        advantage="ippo",
        policy_loss="ppo_clip",
        description="PPO for several agents: one policy, and for each agent a critic and advantages of its own",
        paper="2011.09533",
    ),
)


def ippo(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 0.95,
    whiten: bool = True,
) -> Advantages:
    """Generalised advantage estimation, normalised per agent; with one agent it is ``gae``.

    Args:
        inputs: a batch with ``values_T``, each from the critic of its row's agent, and ``agents_B``.
        gamma: discount per counted token.
        gae_lambda: bias against variance: 0 trusts the critics, 1 trusts the rewards.
        whiten: shift and scale the advantages to mean 0 and variance 1 over the counted tokens of each agent.

    Note:
        The policy is always shared.

    Raises:
        ValueError: ``inputs.values_T`` or ``inputs.agents_B`` is None.
    """
    if inputs.agents_B is None:
        raise ValueError("ippo needs the agent of each row, and the inputs hold none")
    counted, advantages_C, returns_T = generalised(inputs, gamma, gae_lambda)
    if whiten:
        agents_C = np.repeat(inputs.agents_B, lengths(inputs.offsets_B1))[counted.at_C]
        for agent in np.unique(agents_C):
            own_C = agents_C == agent
            advantages_C[own_C] = whitened(advantages_C[own_C])
    return Advantages(counted.spread(advantages_C), returns_T)
