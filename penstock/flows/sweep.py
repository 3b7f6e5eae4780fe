"""Sweep: trainings of one recipe that differ in some settings, each a child flow run, then one report of all.

    plan -> (a free lane -> start a training)* -> all have ended -> report

A training that fails ends no other; the sweep says so and fails in the end. Each is a process of its own, which owns
its engines and its signals (penstock/session/sweeps/trainings.py). What is done stays done: `resume` does what is left.
"""

from __future__ import annotations

from prefect import flow

from penstock.flows.train import train
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.sweeps.plan import BY, Asked, begin_sweep
from penstock.session.sweeps.running import Swept, TrainingsFailed, left, look, running_sweep
from penstock.tasks.sweep.report_sweep import report_sweep
from penstock.tasks.sweep.start_training import note_ended, start_training


@flow(name="sweep", flow_run_name=run_name)
@ends_in_words
def sweep(
    recipe: str | None = None,
    settings: list[str] | None = None,
    random: int | None = None,
    at_once: int | None = None,
    draw_seed: int = 0,
    by: str = BY,
    resume: str | None = None,
) -> str:
    """Train a recipe with every combination of some settings; return the sweep's folder.

    Args:
        recipe: a YAML recipe, e.g. configs/quickstart.yaml.
        settings: what varies, as key=value,value or key=low..high; key=value holds for all.
        random: how many combinations chance takes, each with every seed; default: all combinations.
        at_once: trainings at a time; default: as many as GPUs allow, one on a CPU.
        draw_seed: of the chance that takes combinations.
        by: figure by which the best is told; 'lowest heldout/kl' where less is better.
        resume: folder of a sweep to go on with: it is done as it was asked for.

    Raises:
        UserError: a combination cannot work; none has begun then.
        TrainingsFailed: some trainings did not come to their end.
    """
    folder = begin_sweep(recipe, Asked(tuple(settings or ()), random, draw_seed, by, at_once), resume)
    with running_sweep(folder, train, at_once) as swept:
        for training in left(swept):
            await_lane(swept)
            start_training(swept, training)
        await_all(swept)
        report_sweep(swept)
        if failed := swept.living().failed:
            raise TrainingsFailed(folder, failed)
    return str(folder.path)


def await_lane(swept: Swept) -> None:
    """Wait until a training can begin."""
    while not swept.living().processes.free:
        take_note(swept)


def await_all(swept: Swept) -> None:
    """Wait until no training runs."""
    while swept.living().processes.running:
        take_note(swept)


def take_note(swept: Swept) -> None:
    """Say which trainings have ended in a moment's time."""
    for ended in look(swept):
        note_ended(swept, ended)
