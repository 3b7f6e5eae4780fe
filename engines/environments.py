"""The environments of a rank: their worker processes, started once, and what an episode adds to a response's columns.

Left out: the episodes themselves (engines/episodes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.environment import EnvironmentConfig
from data.prompts import PromptTable
from engines.episodes import Environments, Played, stop_tokens
from environments.pool import EnvironmentPool


@dataclass
class EnvironmentHost:
    """Starts the worker processes at the first generation; keeps the data rows of the prompts that it has seen."""

    pool: EnvironmentPool | None = None
    stop: list[int] = field(default_factory=list)
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def open(self, config: EnvironmentConfig, tokenizer: Any, table: str, prompt_ids: list[str]) -> Environments:
        """Return what plays with the policy from the given prompts of a prompt table.

        Raises:
            UserError: the environment does not load, or ends turns at what is no token.
        """
        if self.pool is None:
            self.pool = EnvironmentPool(config)
            self.stop = stop_tokens(tokenizer, self.pool.stop)
        if table not in self.rows:
            self.rows[table] = PromptTable.load(Path(table)).rows()
        rows = self.rows[table]
        return Environments(self.pool, [rows[name] for name in prompt_ids], tokenizer, self.stop, config.max_turns)

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()


def episode_columns(played: Played) -> dict[str, Any]:
    """Return what episodes have beyond responses, in the form of a command's reply."""
    rewards = [np.nan if reply.reward is None else reply.reward for reply in played.replies]
    return {
        "loss_mask": played.mask_T,
        "turns": played.turns_B,
        "environment_reward": np.asarray(rewards, np.float64),
        "environment_parts": [reply.parts for reply in played.replies],
        "environment_failure": [reply.failure for reply in played.replies],
        "waited_seconds": played.waited_seconds,
    }
