"""Replay: tasks of one iteration of a run again, from what they were given then, and what they give compared with it.

    plan -> folder of the replay -> (engines -> newest checkpoint before -> updates up to the iteration) -> each task
         -> compare

The tasks are those of the training, in a session of their own. The run is only read, so it may be one that failed, or
one that is training. Left out: which runs and iterations can be replayed (penstock/tasks/replay/inputs.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow

from penstock.flows.parts.state_before import bring_before, inputs_of_update
from penstock.session.opening import TRAIN, started
from penstock.session.rollout.draw import restore_memory
from penstock.session.session import Session, Stage, Training, registered
from penstock.session.settings import Settings, next_settings
from penstock.state.experience import RESAMPLED, column_names, drop_experience, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder, new_run_folder
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.forward_passes import ColumnRef, old_logprobs, reference_logprobs, values
from penstock.tasks.iteration.greedy_baseline import greedy_baseline
from penstock.tasks.iteration.reward import reward
from penstock.tasks.iteration.rollout import begin_rollout, rollout
from penstock.tasks.iteration.update import update_actor, update_critic
from penstock.tasks.replay.differences import Columns, Compared, Replayed, compared_columns, compared_figures, same_rows
from penstock.tasks.replay.inputs import PASSES, Plan, laid_out, lend, memory, outputs_of, planned
from penstock.tasks.replay.portions import by_portions, was_in_portions
from penstock.tasks.start import build_engines, load_prompts

Outcome = tuple[Columns, dict[str, float]]  # the columns that a task wrote, and the figures that it gave


@flow(name="replay", flow_run_name="replay-{iteration:06d}")
def replay(
    run_folder: str,
    iteration: int,
    tasks: list[str] | None = None,
    tolerance: float = 0.0,
    to: str | None = None,
) -> Replayed:
    """Run tasks of an iteration again and compare; return a row for each column and figure.

    Args:
        run_folder: of a run of `train`.
        iteration: from 1 on.
        tasks: names of tasks, e.g. update_actor; default: all that can be compared.
        tolerance: share of a value that counts as no difference; 0: the same bits.
        to: folder for what is made again, which stays; default: one beside the run, which stays if something differs.

    Raises:
        UserError: there is no such iteration or task, or what it needs is gone.
    """
    plan = planned(Path(run_folder), iteration, tasks or ())
    folder = new_run_folder(plan.run.path.parent, f"{plan.run.name}-replay", Path(to) if to else None)
    lend(plan, folder)
    with _engines(plan, folder) as training:
        rows, progress = _brought_before(training, plan, tolerance)
        settings = next_settings(training, progress)
        for task in plan.tasks:
            columns, figures = _again(task, training, plan, settings, progress)
            rows += _compared(plan, task, columns, figures, tolerance)
    done = Replayed(tuple(rows), folder.path)
    if to is not None or not done.equal:
        return done
    shutil.rmtree(folder.path)
    return replace(done, folder=None)


@contextmanager
def _engines(plan: Plan, folder: RunFolder) -> Iterator[Training]:
    """Start the engines of the run's configuration, with the models that the run began with, if they are needed."""
    model = str(plan.model)
    if not plan.engines:
        session = Session(plan.config, folder)
        with registered(session) as training, session.stack:
            load_prompts(training, model)
            yield training
        return
    with started(TRAIN, plan.config, folder) as training:
        load_prompts(training, model)
        build_engines(training, model)
        yield training


def _brought_before(training: Training, plan: Plan, tolerance: float) -> tuple[list[Compared], Progress]:
    """Bring the engines to the state before the iteration; return what the updates up to it gave otherwise."""
    rows: list[Compared] = []

    def compare(number: int, figures: dict[str, float]) -> None:
        recorded = plan.recorded.get(number, {})
        found = compared_figures(f"updates of iteration {number}", recorded, figures, tolerance)
        rows.extend(row for row in found if not row.equal)
        drop_experience(training.run.experience(number))

    progress = bring_before(training, plan, lambda number: laid_out(training, plan, number, "update_actor"), compare)
    if plan.state:
        restore_memory(training, memory(training.run), progress.iteration)
    return rows, progress


def _again(task: str, training: Training, plan: Plan, settings: Settings, progress: Progress) -> Outcome:
    """Run a task of the iteration on the columns that were there before it: of the batch, or portion by portion."""
    if task == "rollout":
        begun = begin_rollout(training, settings, progress)
        return _written(rollout(training, settings, begun), [])
    if was_in_portions(plan, task):
        return by_portions(training, plan, settings, task, lambda stage: _on(task, training, settings, stage)[0])
    stage = laid_out(training, plan, plan.iteration, task)
    if task == "update_actor":
        inputs_of_update(training, settings, stage)
        return {}, update_actor(training, settings, stage)
    if task == "update_critic":
        return {}, update_critic(training, settings, stage)
    return _on(task, training, settings, stage)


def _on(task: str, training: Training, settings: Settings, stage: Stage) -> Outcome:
    """Run a task that writes columns on an experience."""
    if task in PASS_TASKS:
        column = PASS_TASKS[task](training, settings, stage.experience)
        return read_columns(column.path, column.columns), {}
    if task == "advantage":
        return _advantage(training, settings, stage)
    before = column_names(stage.experience.path)
    return _written(STAGE_TASKS[task](training, settings, stage), before)


PASS_TASKS: dict[str, Callable[..., ColumnRef]] = {
    "old_logprobs": old_logprobs,
    "reference_logprobs": reference_logprobs,
    "values": values,
}
STAGE_TASKS: dict[str, Callable[..., Stage]] = {"reward": reward, "greedy_baseline": greedy_baseline}


def _written(stage: Stage, before: Sequence[str]) -> Outcome:
    path = stage.experience.path
    written = [name for name in column_names(path) if name not in before]
    return read_columns(path, written), stage.metrics


def _advantage(training: Training, settings: Settings, stage: Stage) -> Outcome:
    """Compute advantages from the stored columns of the forward passes, which the task takes in and leaves as they are.

    With a ratio to the rollout's log-probs the task itself writes the old ones.
    """
    before = column_names(stage.experience.path)
    taken = [name for name in before if name in PASSES]
    if training.config.algorithm.ratio_to_rollout:
        taken = [name for name in taken if name != "logprobs_old"]
    passes = training.run.path / "passes.parquet"
    columns: dict[str, Any] = read_columns(stage.experience.path, taken)
    if columns:
        write_columns(passes, columns)
    refs = [ColumnRef("passes", str(passes), 0.0, tuple(taken))] if columns else []
    return _written(advantage(training, settings, stage, refs), before)


def _compared(plan: Plan, task: str, columns: Columns, figures: dict[str, float], tolerance: float) -> list[Compared]:
    path, recorded = plan.run.experience(plan.iteration), plan.recorded.get(plan.iteration, {})
    names = column_names(path)
    wrote = outputs_of(names, task)
    stored: Columns = read_columns(path, [name for name in names if name in columns or name in wrote])
    if not recorded.keys() & figures.keys():  # no such task was recorded: the iteration broke off, or left it out
        recorded = {}
    if RESAMPLED in names and task in ("rollout", "reward"):  # the figures are those of the first rollout
        figures = {}
    kl = plan.config.algorithm.kl
    if task == "advantage" and kl is not None and kl.place == "loss":  # recorded is what the update says of it
        figures = {name: value for name, value in figures.items() if name != "actor/kl"}
    if task == "rollout":
        stored, columns = same_rows(stored, columns)
    return compared_columns(task, stored, columns, tolerance) + compared_figures(task, recorded, figures, tolerance)
