"""The interface of a game: it says who has the turn, what that agent sees, and what each agent has earned.

Every agent has a conversation of its own, in which it sees what the game tells it and nothing else; all are played by
the policy. What an agent is told first is its prompt.

Left out: playing (penstock/engines/rollout/games/loop.py), a game to look at
(penstock/environments/games/checked_sums.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from penstock.environments.environment import Step


class Game(Protocol):
    """One episode of several agents.

    A class is called with `environment.settings` as keyword arguments. `stop` is as of `Environment`, for all agents;
    `reset` and `step` may be `async`.

    Attributes:
        agents: their names, which `environment.agents` repeats.
    """

    agents: tuple[str, ...]

    def reset(self, row: dict[str, Any], seed: int) -> Step | Awaitable[Step]:
        """Begin the game of a data row; return who has the first turn and what that agent sees.

        Args:
            row: the columns of the data row.
            seed: for everything random; another one for each sample of a prompt, the same when an iteration is
                repeated.
        """

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answer a turn of the agent that has it; return who has the next and what that agent sees, or the end.

        Called for every turn, also for one that was cut at a limit, after which the game is over whatever this returns.
        """


def check_move(step: Step, agents: Sequence[str], last: bool) -> None:
    """Check what a game answered.

    Args:
        last: whether the game is over whatever it answered.

    Raises:
        ValueError: nobody has the turn, or sees nothing; an agent is unknown; a reward is nobody's.
    """
    known = ", ".join(agents)
    if step.reward is not None:
        raise ValueError("a game pays its agents by name: Step(rewards={...}) instead of reward")
    if unknown := sorted(map(str, step.rewards.keys() - {*agents})):
        raise ValueError(f"there is a reward for '{unknown[0]}', and environment.agents has {known}")
    if step.done or last:
        return
    if step.agent not in agents:
        raise ValueError(f"the turn is given to {step.agent!r}, and environment.agents has {known}")
    if not step.observation:
        raise ValueError(f"'{step.agent}' has the turn and is shown nothing: give an observation, or done=True")
