"""A batch that was learnt from in portions, laid out in these for a replay, and what tasks made of them put together.

Which rows a micro-batch has together decides the last bits of what a model computes of each, and what a task has seen
together may decide more. So a replay gives a task the portions that the run gave it. Left out: the gradient, which the
actor's update sums again (penstock/tasks/stream/sum_gradient.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.state.columns import Columns, groups_taken
from penstock.state.experience import (
    add_columns,
    column_names,
    drop_experience,
    origin_of,
    read_columns,
    write_columns,
)
from penstock.tasks.iteration.advantage import advantage_figures
from penstock.tasks.iteration.reward import reward_figures
from penstock.tasks.iteration.rollout import describe
from penstock.tasks.replay.inputs import Plan, laid_out
from penstock.tasks.stream.join import in_order
from penstock.tasks.stream.portion import PORTIONS, portion_path

OF_PORTIONS = ("reward", "old_logprobs", "reference_logprobs", "values", "advantage")  # tasks that get one at a time


def was_in_portions(plan: Plan, task: str) -> bool:
    """Whether the run gave a task of the plan's iteration portions of the batch."""
    return task in OF_PORTIONS and PORTIONS in origin_of(plan.run.experience(plan.iteration))


def by_portions(
    training: Training, plan: Plan, settings: Settings, task: str, run: Callable[[Stage], Mapping[str, Any]]
) -> tuple[Columns, dict[str, float]]:
    """Run a task on each portion, in their order; return the columns of the batch, and the figures as `join` does.

    Args:
        run: runs the task on an experience, and returns the columns that it wrote.
    """
    whole = Path(laid_out(training, plan, plan.iteration, task).experience.path)
    columns, portions = read_columns(whole, column_names(whole)), origin_of(whole)[PORTIONS]
    parts = [_on_portion(training, plan, columns, number, groups, run) for number, groups in enumerate(portions)]
    made = in_order(parts, portions, plan.config.rollout.samples)
    del made["group"]
    if task == "advantage":
        add_columns(whole, made)
        return made, advantage_figures(training, settings, whole)
    return made, reward_figures(made) if task == "reward" else {}


def _on_portion(
    training: Training,
    plan: Plan,
    columns: Columns,
    number: int,
    groups: Sequence[int],
    run: Callable[[Stage], Mapping[str, Any]],
) -> dict[str, Any]:
    """Run a task on some groups of a batch; return the columns that it wrote, and `group`."""
    path = portion_path(training, plan.iteration, number)
    own = groups_taken(columns, np.asarray(groups), plan.config.rollout.samples)
    write_columns(path, own, {PORTIONS: [groups]})
    made = run(Stage(replace(describe(path, own, 0, {}), portion=number), {}))
    drop_experience(path)
    return {"group": own["group"], **made}
