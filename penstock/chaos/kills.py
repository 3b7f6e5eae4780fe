"""Kills: a random process of a training, at a random moment, again and again; then the run has to be as one left alone.

Each kill is SIGKILL to one process: first one of the kinds that live at that moment is drawn, then one of its
processes, so that the many do not hide the few. The next one falls after the training has recorded two further
iterations (the first may have been at its end when the kill fell) and a pause of random length.

Left out: faults other than the death of a process; processes of other machines; the command that waits beside the flow
and starts it again (`penstock train --keep-alive`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import psutil

from penstock.base.errors import UserError
from penstock.chaos.comparison import differences
from penstock.chaos.processes import Found, Kind
from penstock.chaos.training import Training
from penstock.configs.loading.load import load_config
from penstock.state.events import losses
from penstock.state.run_folder import RunFolder

LOOK_S = 0.05
STUCK_S = 600.0  # without a further iteration
GONE_S = 10.0  # for what a training that has ended may still be ending


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and what became of it.

    Attributes:
        run: name of the run folder.
        iteration: the last one that was recorded before.
        noticed_s: seconds until the training said so in its events; None: it did not have to, or its flow was killed.
        two_iterations_s: seconds until two further iterations were recorded, or the training had ended.
    """

    run: str
    kind: Kind
    iteration: int
    noticed_s: float | None
    two_iterations_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of it: the kills, where runs differ from the one that was left alone, and what outlived its run."""

    kills: list[Kill]
    differences: dict[str, list[str]]  # by name of the run, nothing for one that is equal
    orphans: list[str]


@dataclass(frozen=True)
class Chaos:
    """What is to be done.

    Attributes:
        folder: gets the runs.
        kills: how many.
        pause_s: the longest pause between a training's recovery and the next kill.
        seed: of kinds, processes and pauses.
    """

    recipe: Path
    overrides: Sequence[str]
    folder: Path
    kills: int
    pause_s: float
    seed: int


def unleash(chaos: Chaos, tell: Callable[[str], None]) -> Outcome:
    """Train once undisturbed, then as often as it takes for all kills; compare.

    Args:
        tell: gets a sentence on everything that happens.

    Raises:
        UserError: the recipe cannot be trained undisturbed, has too few iterations to be killed in, or is never the
            same twice.
    """
    rollout = load_config(chaos.recipe, chaos.overrides).rollout
    if rollout.begins_ahead:
        raise UserError(
            "with rollout.stream.staleness no two trainings are equal, killed or not: weights change in the middle of "
            "a rollout, at another moment each time",
            "give rollout.stream=null",
        )
    if rollout.keeps_kv_cache:
        raise UserError(
            "with rollout.carry.keep_kv_cache a training that was killed is not equal to one that was not: the keys of "
            "older weights are gone with their engine",
            "give rollout.carry.keep_kv_cache=false",
        )
    chaos.folder.mkdir(parents=True)
    alone = _left_alone(chaos, tell)
    random, kills, found, orphans = Random(chaos.seed), list[Kill](), dict[str, list[str]](), list[str]()
    while len(kills) < chaos.kills:
        training = _training(chaos, f"killed-{len(found) + 1:03d}")
        kills += _under_fire(training, chaos.kills - len(kills), chaos.pause_s, random, tell)
        left = _left_over(training)
        orphans += [f"{training.run.name}: {one.kind}, process {one.process.pid}" for one in left]
        ended = training.exit_code == 0
        found[training.run.name] = differences(alone, training.run) if ended else [_bad_end(training)]
        tell(f"{training.run.name}: {'; '.join(found[training.run.name]) or 'equal'}")
        if not found[training.run.name] and not any(kill.run == training.run.name for kill in kills):
            raise UserError("the training ended before the first kill", "give it more iterations, or a shorter --pause")
    return Outcome(kills, found, orphans)


def _training(chaos: Chaos, name: str) -> Training:
    """Return a training that may be lost as often as it takes."""
    overrides = [f"engine.restarts={chaos.kills}", *chaos.overrides]
    return Training(chaos.recipe, overrides, RunFolder((chaos.folder / name).absolute()))


def _left_alone(chaos: Chaos, tell: Callable[[str], None]) -> RunFolder:
    training = _training(chaos, "left-alone")
    tell(f"a training that is left alone: {training.run.path}")
    began = time.monotonic()
    training.start()
    assert training.command is not None
    if training.command.wait():
        raise UserError(f"left alone, it does not train either:\n{training.last_words()}", f"see {training.log}")
    tell(f"it took {time.monotonic() - began:.0f} s")
    return training.run


def _under_fire(
    training: Training, kills: int, pause_s: float, random: Random, tell: Callable[[str], None]
) -> list[Kill]:
    """Kill until the training has ended, or enough; return the kills once it has ended."""
    done: list[Kill] = []
    training.start()
    gets_on = _await_iteration(training, 0)
    while gets_on and len(done) < kills and _still_trains(training, random.uniform(0.0, pause_s)):
        if not (alive := training.processes()):
            break  # it is about to say its exit code
        kill, gets_on = _kill(training, _drawn(alive, random), tell)
        done.append(kill)
    assert training.command is not None
    if gets_on:
        training.command.wait()
    else:
        training.end()
    return done


def _still_trains(training: Training, seconds: float) -> bool:
    """Wait; return whether the training goes on after that."""
    deadline = time.monotonic() + seconds
    while training.exit_code is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return training.exit_code is None


def _kill(training: Training, victim: Found, tell: Callable[[str], None]) -> tuple[Kill, bool]:
    """Kill a process, and wait until the training has got on; return whether it has."""
    before = training.iteration
    at, began = datetime.now(UTC), time.monotonic()
    with suppress(psutil.NoSuchProcess):  # a worker that had nothing left to do
        victim.process.kill()
    tell(f"{training.run.name}: killed a process ({victim.kind}) after iteration {before}")
    gets_on = _await_iteration(training, before + 2)
    two_iterations_s = time.monotonic() - began
    return Kill(training.run.name, victim.kind, before, _noticed_s(training.run, at), two_iterations_s), gets_on


def _drawn(processes: Sequence[Found], random: Random) -> Found:
    kinds = sorted({found.kind for found in processes})
    kind = random.choice(kinds)
    return random.choice(sorted((one for one in processes if one.kind == kind), key=lambda one: one.process.pid))


def _await_iteration(training: Training, number: int) -> bool:
    """Wait until an iteration is recorded or the training has ended; return False where it stands still."""
    deadline = time.monotonic() + STUCK_S
    while training.iteration < number and training.exit_code is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _bad_end(training: Training) -> str:
    code = training.exit_code
    how = f"stood still for {STUCK_S:.0f} s" if code is None or code < 0 else f"ended with exit code {code}"
    return f"{how} (see {training.log} and {training.run.logs})"


def _noticed_s(run: RunFolder, at: datetime) -> float | None:
    """Return the seconds from a kill to the first loss that the training noticed after it."""
    later = [datetime.fromisoformat(event["at"]) for event in losses(run)]
    return next(((moment - at).total_seconds() for moment in later if moment >= at), None)


def _left_over(training: Training) -> list[Found]:
    """Return processes that have outlived their training, which are ended now."""
    deadline = time.monotonic() + GONE_S
    while (left := training.processes()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.process.kill()
    return left
