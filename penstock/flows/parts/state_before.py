"""The engines brought to the state before an iteration: a snapshot, or a checkpoint and the updates since then.

An update is a function of models, experience and the values in force, so what lies between two checkpoints can be had
again from the experience that the run keeps, on a CPU to the last bit. Used by a replay, and by a training that goes
back behind a numerical fault and has no snapshot from before it. Left out: which iterations this is possible for
(penstock/tasks/replay/inputs.py).
"""

from __future__ import annotations

from collections.abc import Callable

from prefect import get_run_logger

from penstock.base.errors import UserError
from penstock.flows.parts.updates import update
from penstock.reports.faults import UNDONE, Fault
from penstock.session.record import append_record
from penstock.session.rollout.generation import await_rollouts
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings, next_settings
from penstock.state.manifest import Progress
from penstock.tasks.iteration.checkpoint import kept_at, load_checkpoint, load_snapshot
from penstock.tasks.iteration.faults import ERRORS, remedy
from penstock.tasks.iteration.forward_passes import reference_logprobs
from penstock.tasks.iteration.refresh_reference import refresh_due, refresh_reference
from penstock.tasks.iteration.reshard import reshard
from penstock.tasks.replay.inputs import Plan, following, planned, stored, undone_later
from penstock.tasks.stream.sum_gradient import sum_again

Told = Callable[[int, dict[str, float]], None]


def bring_before(
    training: Training, plan: Plan, experience: Callable[[int], Stage], told: Told = lambda _, __: None
) -> Progress:
    """Bring engines that hold models to the state before the plan's iteration; return the progress there.

    Args:
        experience: gives that of an iteration.
        told: gets the figures of each update that is done again.
    """
    progress = plan.start
    if plan.state and plan.checkpoint is not None:
        load_checkpoint(training, plan.checkpoint, progress)
    while progress.iteration < plan.iteration - 1:
        if plan.state:
            _again(training, plan, next_settings(training, progress), experience, told)
        progress = following(training, plan, progress)
    return progress


def _again(training: Training, plan: Plan, settings: Settings, experience: Callable[[int], Stage], told: Told) -> None:
    """Do all of an iteration that changes the models."""
    number = settings.iteration
    if not plan.undone(number):
        stage = experience(number)
        inputs_of_update(training, settings, stage)
        told(number, update(training, settings, stage))
    reshard(training, settings, version=number)
    if refresh_due(plan.config, number):
        refresh_reference(training, number)


def inputs_of_update(training: Training, settings: Settings, stage: Stage) -> None:
    """Make again what an update uses up, of experience that has all its columns.

    The hidden states of the reference that a loss with a KL over the vocabulary reads, and deletes; a gradient that was
    summed while others generated.
    """
    algorithm = training.config.algorithm
    if algorithm.full_kl and algorithm.kl_in_loss:
        reference_logprobs(training, settings, stage.experience)
    if training.config.rollout.in_portions:
        sum_again(training, settings, stage)


def go_back(training: Training, number: int, fault: Fault) -> None:
    """Bring a training that goes on to the state before the updates that a fault in iteration `number` undoes.

    Raises:
        NumericalFault: there is no checkpoint from which that state can be had.
    """
    first = max(1, number + 1 - fault.undone)
    training.session().say("going back", f"to before iteration {first}")
    training.session().rolled_back += 1
    place = _load_kept(training, number, first) or _done_again(training, number, first, fault)
    for undone in range(first, number):
        append_record(training, undone, {UNDONE: float(number)})
    get_run_logger().warning("the weights are those before iteration %d again, from %s", first, place)


def _load_kept(training: Training, number: int, first: int) -> str:
    """Bring a training to the snapshot before iteration `first`; return its name, empty where it cannot be used."""
    kept = kept_at(training, first - 1)
    if kept is None or undone_later(training.run, kept.iteration, number):
        return ""
    await_rollouts(training)  # one that is ahead ends with the weights that it has, which are newer than those to come
    load_snapshot(training, kept)
    return f"snapshot {kept.iteration:06d}"


def _done_again(training: Training, number: int, first: int, fault: Fault) -> str:
    """Bring a training to the newest checkpoint before iteration `first` and do the updates since then again."""
    training.session().consolidator.wait()
    try:
        plan = planned(training.run.path, first, ["update_actor"], as_of=number)
    except UserError as error:
        raise _no_way_back(training, number, fault, error.problem) from error
    if plan.checkpoint is None:
        raise _no_way_back(training, number, fault, f"there is no checkpoint before iteration {first}")
    await_rollouts(training)
    bring_before(training, plan, lambda earlier: stored(plan, earlier))
    return f"checkpoint {plan.checkpoint.name}"


def _no_way_back(training: Training, number: int, fault: Fault, why: str) -> UserError:
    problem = f"iteration {number}: {fault.says}; there is no way back: {why}"
    return ERRORS[fault.name](problem, remedy(training, number, fault.name))
