"""The commands about critics: one, or with several agents one for each, which sees the rows of its agent alone.

Every critic has weights, an optimizer and a count of steps of its own; checkpoints hold each under its name. The
experience's column `agent` says which row is whose.

Left out: losses and steps (penstock/engines/training/updates.py). Suffix: `_B` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from penstock.engines.batches.packing import Rows, read_rows
from penstock.engines.commands.forward import TokenValues, Values
from penstock.engines.commands.update import UpdateCritic, Updated
from penstock.engines.kernels.sequence_parallel import ranks_together
from penstock.engines.models.models import PackedCritic
from penstock.engines.ranks.forward import per_token
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out, in_portions
from penstock.engines.ranks.update import measured
from penstock.engines.training import updates
from penstock.engines.training.trainer import Trainer
from penstock.engines.weights.layout import ordered_parameters
from penstock.state.experience import AGENT, read_columns


def critic_names(agents: Sequence[str]) -> list[str]:
    """Return the critics' names among the trained models, in the agents' order; also their folders in a checkpoint."""
    return [f"critic/{agent}" for agent in agents] or ["critic"]


def build_critics(models: RankModels, folder: str, agents: Sequence[str], steps: int) -> None:
    """Load the critic, or one for each agent; all start alike."""
    config = models.config.critic
    assert config is not None
    for name in critic_names(agents):
        torch.manual_seed(models.config.seed)
        critic = PackedCritic(models.causal_lm(folder, config), models.images)
        if config.offload == "nothing":
            critic.to(models.device)
        models.trainers[name] = Trainer(
            critic,
            ordered_parameters(critic),
            config,
            steps,
            stops_at=models.config.faults.stops_at,
            ranks=ranks_together(config.sequence_parallel),
        )


@carries_out(Values, during_generation=in_portions, beside=True)
@torch.no_grad()
def values(models: RankModels, command: Values) -> TokenValues:
    """Compute each critic's values for the rows of its agent, of which this rank has a share."""
    rows, replies = read_rows(command.path), []
    for name, index_B in _rows_of_critics(command.path, len(rows), command.agents):
        reply = per_token(models, _own(rows, index_B), "critic", command.budget, models.model(name))
        replies.append(TokenValues(index_B[reply.rows], reply.values_T))
    return TokenValues(
        np.concatenate([reply.rows for reply in replies]), np.concatenate([reply.values_T for reply in replies])
    )


@carries_out(UpdateCritic)
def update_critic(models: RankModels, command: UpdateCritic) -> Updated:
    """Train each critic on the rows of its agent in every mini-batch.

    The figures of several critics are their means (of skipped steps the sum), and beside them each agent's by name.
    """
    rows, plan, replies = read_rows(command.path, ("values", "returns")), command.split, {}
    for name, index_B in _rows_of_critics(command.path, len(rows), command.agents):
        trainer, accepting = models.trainers[name], _accepting(rows, index_B)
        update = partial(updates.update_critic, trainer, accepting, plan, command.clip, command.learning_rate)
        replies[name] = measured(models, _own(rows, index_B), "critic", trainer, plan, update)
    figures = _means(list(replies.values()))
    figures["skipped_steps"] = float(sum(reply["skipped_steps"] for reply in replies.values()))
    for agent in command.agents:
        figures |= {f"critic/{agent}/{name}": value for name, value in replies.get(f"critic/{agent}", {}).items()}
    return Updated(figures)


def _rows_of_critics(path: str, rows: int, agents: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each critic's name and rows; an agent without rows is left out, on every rank alike."""
    numbers_B = read_columns(path, [AGENT])[AGENT] if agents else np.zeros(rows, np.int64)
    for number, name in enumerate(critic_names(agents)):
        index_B = np.flatnonzero(numbers_B == number)
        if len(index_B):
            yield name, index_B


def _own(rows: Rows, index_B: np.ndarray) -> Rows:
    """Return the chosen rows; the whole batch is returned without a copy."""
    return rows if len(index_B) == len(rows) else rows.take(index_B)


def _accepting(rows: Rows, index_B: np.ndarray) -> Rows:
    """Return all rows, so that mini-batches are the actor's, with a mark at those that the update looks at."""
    if len(index_B) == len(rows):
        return rows
    own_B = np.isin(np.arange(len(rows)), index_B)
    return replace(rows, accepted_B=own_B if rows.accepted_B is None else own_B & rows.accepted_B)


def _means(figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of figures of the same name."""
    names = dict.fromkeys(name for item in figures for name in item)
    return {name: float(np.mean([item[name] for item in figures if name in item])) for name in names}
