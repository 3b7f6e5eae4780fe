"""Draw: the prompts of a rollout, by the sampler; and what it remembers of the prompts drawn before.

The memory is kept only for a sampler that asks for it. It grows with each scored rollout, goes to the run folder when
its iteration is recorded, and comes back from a checkpoint in a resumed run (penstock/state/prompt_rewards.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.data.samplers import Drawn, PromptDraws, load_sampler
from penstock.session.session import Training
from penstock.state.prompt_rewards import append_prompt_rewards, restore_prompt_rewards


def draw(training: Training, iteration: int, cursor: int, count: int) -> np.ndarray:
    """Return the rows (int64, `count` of them) of the training prompts that a rollout answers.

    Args:
        iteration: from 1 on.
        cursor: prompts drawn before, those of this iteration's earlier rollouts included.
        count: prompts wanted.

    Raises:
        UserError: a user's sampler failed, or is not a function of its arguments alone.
    """
    draws, config = _draws(training), training.config
    sampler = draws.sampler
    arguments = {
        "table": training.session().prompts["train"].frame,
        "count": count,
        "cursor": cursor,
        "iteration": iteration,
        "seed": config.seed,
        "samples": config.rollout.samples,
        "history": draws.history() if sampler.remembers else None,
    }
    rows = sampler.draw(arguments)
    if not draws.repeats and not np.array_equal(rows, sampler.draw(arguments)):
        raise UserError(
            f"data.sampler.name '{sampler.spec}' returned other rows when asked the same again, so that a resumed run "
            "could not go on with the same prompts",
            "draw from numpy.random.default_rng([seed, cursor]) and keep no state between calls",
        )
    draws.repeats = True
    return rows


def draws_by_rewards(training: Training) -> bool:
    """Whether the sampler wants to know what earlier prompts have earned."""
    return _draws(training).sampler.remembers


def remember(training: Training, iteration: int, rollout: int, prompt_ids: list[str], rewards_B: np.ndarray) -> None:
    """Keep what the prompts of a rollout earned, if the sampler wants to know; done again, it replaces itself.

    Args:
        rollout: number within the iteration, 0 for the first.
        prompt_ids: of every response; those to a prompt are neighbours.
        rewards_B: of every response.
    """
    draws, samples = _draws(training), training.config.rollout.samples
    if draws.sampler.remembers:
        rows = draws.ids.get_indexer(pd.Index(prompt_ids[::samples])).astype(np.int64)
        means = np.asarray(rewards_B, np.float64).reshape(-1, samples).mean(axis=1)
        draws.drawn.setdefault(iteration, {})[rollout] = (rows, means)


def keep_memory(training: Training, iteration: int) -> None:
    """Write what the prompts of an iteration earned to the run folder, if the sampler wants to know."""
    draws = _draws(training)
    if draws.sampler.remembers:
        rollouts = [
            list(zip(draws.ids[rows].tolist(), rewards.tolist(), strict=True))
            for rows, rewards in draws.drawn[iteration].values()
        ]
        append_prompt_rewards(training.run, iteration, rollouts)


def restore_memory(training: Training, checkpoint: Path | None, iteration: int) -> None:
    """Bring the sampler's memory to the end of `iteration`, of which `checkpoint` is the folder (None before any).

    The run's own folder serves as well, where it was left in this process.

    Raises:
        UserError: the checkpoint lacks an iteration.
    """
    draws = _draws(training)
    if draws.sampler.remembers:
        restored = restore_prompt_rewards(training.run, checkpoint, iteration)
        draws.drawn = {
            number: {rollout: _drawn(draws, entries) for rollout, entries in enumerate(rollouts)}
            for number, rollouts in restored.items()
        }


def _drawn(draws: PromptDraws, entries: list[tuple[str, float]]) -> Drawn:
    rows = draws.ids.get_indexer(pd.Index([name for name, _ in entries])).astype(np.int64)
    return rows, np.asarray([reward for _, reward in entries], np.float64)


def _draws(training: Training) -> PromptDraws:
    session = training.session()
    if session.draws is None:
        ids = pd.Index(session.prompts["train"].frame["prompt_id"])
        session.draws = PromptDraws(load_sampler(session.config.data.sampler), ids)
    return session.draws
