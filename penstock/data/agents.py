"""Which agent each row of the data is for, or each row of a game."""

from __future__ import annotations

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.configs.sections.data import AgentsConfig


def agent_numbers(frame: pd.DataFrame, agents: AgentsConfig, source: str) -> np.ndarray:
    """Return for each row the place of its agent in `agents.names`, int64.

    Args:
        source: what to call the data in an error.

    Raises:
        UserError: a row names no agent, or there is no such column.
    """
    if agents.column not in frame.columns:
        raise UserError(f"{source} has no column '{agents.column}'", f"data.agents.column: {', '.join(frame.columns)}")
    places = {name: place for place, name in enumerate(agents.names)}
    numbers = frame[agents.column].astype(str).map(places)
    if numbers.isna().any():
        unknown = frame[agents.column][numbers.isna()].iloc[0]
        raise UserError(
            f"{source}: column '{agents.column}' has the value '{unknown}'",
            f"data.agents.names has {', '.join(agents.names)}: add it, or leave such rows out",
        )
    return numbers.to_numpy(np.int64)


def numbers_of_players(prompts: int, players: int, samples: int) -> np.ndarray:
    """Return whose each row of games is, int64: of a prompt the samples of the first agent, then the second's, ..."""
    return np.tile(np.repeat(np.arange(players), samples), prompts)
