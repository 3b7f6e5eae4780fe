"""The commands about critics: one, or with several agents one for each, which sees the rows of its agent alone.

Every critic has weights, an optimizer and a count of steps of its own; checkpoints hold each under its name. They are
functions of the rank's `Worker`, which finds them by name in `COMMANDS`. The experience's column `agent` says which
row is whose.

Left out: losses and steps (engines/training/updates.py). Suffix: `_B` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.batches.packing import Rows, read_rows
from engines.models.models import PackedCritic
from engines.training import updates
from engines.training.trainer import Trainer
from engines.training.updates import Split
from engines.weights.layout import ordered_parameters
from penstock.state.experience import AGENT, read_columns

if TYPE_CHECKING:
    from engines.ranks.worker import Worker


def critic_names(agents: Sequence[str]) -> list[str]:
    """Return the critics' names among the trained models, in the agents' order; also their folders in a checkpoint."""
    return [f"critic/{agent}" for agent in agents] or ["critic"]


def build_critics(worker: Worker, folder: str, agents: Sequence[str], steps: int) -> None:
    """Load the critic, or one for each agent; all start alike."""
    config = worker.config.critic
    assert config is not None
    for name in critic_names(agents):
        torch.manual_seed(worker.config.seed)
        critic = PackedCritic(worker.causal_lm(folder, config)).to(worker.device)
        worker.trainers[name] = Trainer(critic, ordered_parameters(critic), config, steps)


@torch.no_grad()
def values(worker: Worker, path: str, budget: int, agents: Sequence[str] = ()) -> dict[str, Any]:
    """Values of response tokens by the critic of each row's agent, for this rank's share of rows."""
    rows = read_rows(path)
    replies = []
    for name, index_B in _rows_of_critics(path, len(rows), agents):
        reply = worker.per_token(_own(rows, index_B), "critic", budget, worker.model(name))
        replies.append(reply | {"rows": index_B[reply["rows"]]})
    joined = {name: np.concatenate([reply[name] for reply in replies]) for name in ("rows", "values")}
    return {**joined, "usage": _combined([reply["usage"] for reply in replies], sum)}


def update_critic(
    worker: Worker,
    path: str,
    split: dict[str, Any],
    clip: float | None,
    learning_rate: float,
    agents: Sequence[str] = (),
) -> dict[str, Any]:
    """Train the critic on the actor's experience; of several each on the rows of its agent in every mini-batch.

    The figures of several critics are their means (of skipped steps the sum), and beside them each agent's by name.
    """
    rows, plan, replies = read_rows(path, ("values", "returns")), Split(**split), {}
    for name, index_B in _rows_of_critics(path, len(rows), agents):
        trainer = worker.trainers[name]
        update = partial(updates.update_critic, trainer, _accepting(rows, index_B), plan, clip, learning_rate)
        replies[name] = worker.measured(_own(rows, index_B), "critic", trainer, plan, update)
    usage = _combined([reply.pop("usage") for reply in replies.values()], sum)
    figures = _combined(list(replies.values()), np.mean)
    figures["skipped_steps"] = float(sum(reply["skipped_steps"] for reply in replies.values()))
    for agent in agents:
        figures |= {f"{agent}/{name}": value for name, value in replies.get(f"critic/{agent}", {}).items()}
    return {**figures, "usage": usage}


def _rows_of_critics(path: str, rows: int, agents: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each critic's name and rows; an agent without a row here is left out, on every rank alike."""
    numbers_B = read_columns(path, [AGENT])[AGENT] if agents else np.zeros(rows, np.int64)
    for number, name in enumerate(critic_names(agents)):
        index_B = np.flatnonzero(numbers_B == number)
        if len(index_B):
            yield name, index_B


def _own(rows: Rows, index_B: np.ndarray) -> Rows:
    """Some of the rows; all of them are not copied."""
    return rows if len(index_B) == len(rows) else rows.take(index_B)


def _accepting(rows: Rows, index_B: np.ndarray) -> Rows:
    """All rows, so that mini-batches are the actor's, of which the update looks at some."""
    if len(index_B) == len(rows):
        return rows
    own_B = np.isin(np.arange(len(rows)), index_B)
    return replace(rows, accepted_B=own_B if rows.accepted_B is None else own_B & rows.accepted_B)


def _combined(figures: list[dict[str, float]], combine: Callable[[list[float]], float]) -> dict[str, float]:
    """Combine figures of the same name."""
    names = dict.fromkeys(name for item in figures for name in item)
    return {name: float(combine([item[name] for item in figures if name in item])) for name in names}


COMMANDS = {function.__name__: function for function in (values, update_critic)}
