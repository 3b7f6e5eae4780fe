"""Who plays with the policy in an engine's episodes: worker processes, started at the first generation and kept.

Between two generations it has what these have left: episodes that are under way, with their environments in the pool.

Suffix: `_P` prompts.
Left out: playing (penstock/engines/rollout/episodes.py, games/), the processes (penstock/environments/pool.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.sections.data import DataConfig
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.data.prompts import PromptTable
from penstock.engines.rollout.agents import Agents, agents_of
from penstock.engines.rollout.chat import ChatMarkup
from penstock.engines.rollout.detokenize import decode
from penstock.engines.rollout.episode import Episode
from penstock.environments.pool import EnvironmentPool


@dataclass(frozen=True)
class Players:
    """The agents of a game.

    Attributes:
        names: in the order of their numbers.
        served: how what they are shown becomes tokens.
        chat: whether that is a user's message of a chat; else a text that goes on.
    """

    names: tuple[str, ...]
    served: Agents
    chat: bool


@dataclass(frozen=True)
class Alive:
    """What a generation has left of an episode whose environment lives.

    Attributes:
        known: a digest of how far it is.
        episode: of an agent, whose turns may be under way; an environment's is what was carried.
    """

    known: str
    episode: Episode | None = None


@dataclass(frozen=True)
class Environments:
    """Who plays with the policy, and by which rules.

    Attributes:
        chat: the markup of turns, where the environment has tools.
        agents: how they are served, where agents ask the policy.
        players: those of a game, which penstock/engines/rollout/games/ plays.
        live: episodes that a generation has left, by their seeds; their environments are in the pool.
    """

    pool: EnvironmentPool
    rows_P: Sequence[Mapping[str, Any]]  # the data row of every prompt
    tokenizer: Any
    stop_tokens: list[int]  # that end a turn, besides the model's own
    max_turns: int
    chat: ChatMarkup | None = None
    live: dict[int, Alive] = field(default_factory=dict)
    agents: Agents | None = None
    players: Players | None = None


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    """Return the tokens that end a turn: all whose text contains one of `stop`.

    Raises:
        UserError: a text is no single token.
    """
    if not stop:
        return []
    found = set()
    for text in stop:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            raise UserError(
                f"the environment ends turns at {text!r}, which is no single token of the model",
                "end a turn at a character or token that the tokenizer has, or let the model end it by end-of-sequence",
            )
        found.add(tokens[0])
    count = len(tokenizer)
    texts = decode(tokenizer, Ragged(np.arange(count), np.arange(count + 1)))
    return sorted(found | {token for token, text in enumerate(texts) if any(part in text for part in stop)})


@dataclass
class EnvironmentHost:
    """Starts the worker processes at the first generation; keeps the data rows of the prompts that it has seen.

    Attributes:
        live: as in `Environments`.
    """

    pool: EnvironmentPool | None = None
    stop: list[int] = field(default_factory=list)
    chat: ChatMarkup | None = None
    agents: Agents | None = None
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    live: dict[int, Alive] = field(default_factory=dict)

    def open(
        self,
        config: EnvironmentConfig,
        tokenizer: Any,
        table: str,
        prompt_ids: list[str],
        data: DataConfig,
    ) -> Environments:
        """Return what plays with the policy from the given prompts of a prompt table.

        Raises:
            UserError: the environment does not load, or ends turns at what is no token.
        """
        if self.pool is None:
            self.pool = EnvironmentPool(config, run=Path(table).parent.parent)
            self.stop = stop_tokens(tokenizer, self.pool.stop)
            if self.pool.has_tools:
                self.chat = ChatMarkup(tokenizer, data.chat_arguments, config.tool_parser)
                self.stop = [self.chat.end_of_turn]
            if self.pool.is_agent or config.agents:
                self.agents = agents_of(tokenizer, config, data)
                chats = self.pool.is_agent or data.chat  # a game of texts asks nothing of the template
                if chats and self.agents.chat is not None:
                    self.stop = sorted({*self.stop, self.agents.chat.end_of_turn})
        if table not in self.rows:
            self.rows[table] = PromptTable.load(Path(table)).rows()
        rows = self.rows[table]
        rows_P = [rows[name] for name in prompt_ids]
        players = None
        if config.agents is not None and self.agents is not None:
            players = Players(tuple(config.agents), self.agents, data.chat)
        return Environments(
            self.pool, rows_P, tokenizer, self.stop, config.max_turns, self.chat, self.live, self.agents, players
        )

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()
