"""Faults: an iteration whose numbers say that nothing should be learnt from its batch.

The batch is kept, whatever follows: in `faults/` of the run folder, under the number of the iteration, with what was
wrong as JSON beside it. Left out: the decision (penstock/reports/faults.py); the way back
(penstock/flows/parts/state_before.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.errors import (
    EntropyCollapsed,
    GradientNotFinite,
    KlExploded,
    RewardCollapsed,
)
from penstock.base.files import write_text
from penstock.reports.faults import FAULT, UNDONE, Fault, fault_after, fault_before, too_many
from penstock.session.events import tell
from penstock.session.figures import history
from penstock.session.record import finite
from penstock.session.session import Stage, Training
from penstock.state.events import FAULT as EVENT
from penstock.state.experience import consolidate
from penstock.tasks.iteration.forward_passes import states_path

ERRORS = {"kl": KlExploded, "update_kl": KlExploded, "entropy": EntropyCollapsed, "reward": RewardCollapsed}
REMEDIES = {
    "kl": "lower actor.optimizer.learning_rate or raise algorithm.kl.coefficient",
    "update_kl": "lower actor.optimizer.learning_rate, or take fewer steps on one batch",
    "entropy": "raise algorithm.entropy_coefficient or algorithm.settings.clip_high",
    "reward": "look at the responses and at what failed in their rewards",
}


def known_before(training: Training, metrics: dict[str, float]) -> Fault | None:
    """Return what is wrong with a batch before anything is learnt from it."""
    faults = training.config.faults
    if faults.kl is None and faults.reward is None:
        return None
    return fault_before(faults, history(training), metrics)


def known_after(training: Training, metrics: dict[str, float]) -> Fault | None:
    """Return what is wrong with an iteration after its update."""
    return fault_after(training.config.faults, metrics, training.config.algorithm.kl_before_update)


@task(task_run_name="fault-{number:06d}", cache_policy=NO_CACHE)
def meet(training: Training, number: int, fault: Fault, stage: Stage, metrics: dict[str, float]) -> dict[str, float]:
    """Keep the batch of an iteration with a fault, and say so; return the fault as figures of the iteration.

    Raises:
        NumericalFault: the training is to end: it says so, or it is one fault too many in a row.
    """
    run, again = training.run, too_many(history(training))
    states_path(stage.experience).unlink(missing_ok=True)  # an update would have deleted it
    action = "stop" if again else fault.action
    what = dataclasses.asdict(fault) | {"value": str(fault.value), "action": action, "metrics": finite(metrics)}
    keep(training, number, what)
    if action == "stop":
        many = ", in the third iteration in a row" if again and fault.action != "stop" else ""
        raise ERRORS[fault.name](f"iteration {number}: {fault.says}{many}", remedy(training, number, fault.name))
    done = {"skip": "nothing is learnt from its batch", "rollback": "its updates are undone"}[fault.action]
    get_run_logger().warning("iteration %d: %s: %s, which is kept in %s", number, fault.says, done, run.faulty(number))
    return {FAULT + fault.name: 1.0, UNDONE: float(number)}


def remedy(training: Training, number: int, name: str) -> str:
    """Return how to look at a batch that was kept, and how to go on."""
    place = quote(str(training.run.path))
    return (
        f"its batch is kept in {training.run.faulty(number)}, and 'penstock replay {place} {number}' does its tasks "
        f"again; {REMEDIES[name]}; 'penstock train --resume {place} faults.{name}=null' goes on regardless"
    )


@contextmanager
def batch_kept(training: Training, number: int) -> Iterator[None]:
    """Keep the batch of an iteration in whose update a gradient is not finite.

    Raises:
        GradientNotFinite: with the command that does the update again.
    """
    try:
        yield
    except GradientNotFinite as error:
        keep(training, number, {"name": "gradient", "says": error.problem, "action": "stop"})
        again = f"penstock replay {quote(str(training.run.path))} {number} update_actor"
        how = f"the batch of iteration {number} is kept in {training.run.faulty(number)}"
        raise GradientNotFinite(error.problem, f"{error.remedy}; {how}, and '{again}' does it again") from error


def keep(training: Training, number: int, what: Mapping[str, Any]) -> None:
    """Keep an iteration's experience as it is now, with what is wrong with it, and tell the fault."""
    run = training.run
    training.session().consolidator.wait()
    path, kept = run.experience(number), run.faulty(number)
    consolidate(path)
    kept.parent.mkdir(exist_ok=True)
    kept.unlink(missing_ok=True)
    _link(path, kept)
    write_text(kept.with_suffix(".json"), json.dumps({"iteration": number, **what}, indent=1) + "\n")
    said = {name: what[name] for name in ("name", "says", "action")}
    tell(training, EVENT, iteration=number, **said, batch=str(kept.relative_to(run.path)))


def tell_of_skipped_steps(training: Training, number: int, metrics: Mapping[str, float]) -> None:
    """Tell of optimizer steps of an iteration that were not taken, since their gradient is not finite."""
    for role in ("actor", "critic"):
        if skipped := int(metrics.get(f"{role}/skipped_steps", 0)):
            says = f"{skipped} optimizer steps of the {role} were not taken: the gradient is NaN or infinite"
            tell(training, EVENT, iteration=number, name="gradient", says=says, action="skip")


def _link(path: Path, target: Path) -> None:
    """Let `target` have the content that `path` has now: files of experience are replaced, never changed."""
    try:
        os.link(path, target)
    except OSError:  # no links on that file system
        shutil.copy2(path, target)
