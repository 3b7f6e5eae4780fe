"""How a run is opened, anew or to go on: the one way of every flow, and what its command looks at before.

    check -> folder -> lock -> (make whole, change) -> configuration written -> admission -> memory -> engines

Nothing is written before the lock is held: two processes may be told to go on with one run, and the second is refused
and has changed nothing. Each data file is read once until the rows are tokenized. Left out: what a run does once it is
open (penstock/flows/), what makes a damaged folder whole (penstock/state/mending.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Generic, TypeVar

from prefect import get_run_logger
from prefect.runtime import deployment, flow_run

from penstock.base.errors import UserError
from penstock.checks.found_models import with_models_found
from penstock.checks.memory import (
    Elsewhere,
    GroupEstimate,
    NoRoom,
    check_finetuning_memory,
    check_memory,
    describe_snapshots,
)
from penstock.checks.preferences import check_preferences
from penstock.checks.tokenized import check_tokenized
from penstock.checks.training import check_inputs, check_supervised
from penstock.configs.idle import idle_settings, idle_steps
from penstock.configs.loading.resuming import OF_PAIRS, OF_SFT, OF_TRAIN, Resumable, course_changes, resumed_config
from penstock.configs.preference import PairConfig, PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import MOST_TOGETHER, TrainerConfig
from penstock.configs.tree.section import fill
from penstock.data.source import reading_once
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import place
from penstock.session.flow_run import RUN_TAG
from penstock.session.flow_runs.kept_alive import crashes
from penstock.session.machines.admission import admission
from penstock.session.machines.claims import wanted_by, would_get
from penstock.session.machines.hosts import hosted
from penstock.session.machines.pools import gpus_of_pools
from penstock.session.prefect import patient_clients, terminations_heard
from penstock.session.session import Training, open_session, read_config, write_config
from penstock.session.settings import offer_overrides
from penstock.state.digests import Damaged
from penstock.state.events import append_flow_lost
from penstock.state.manifest import ANEW, check_kind, check_resumable, completed, ended, read_progress
from penstock.state.mending import checkpoint_named, mend
from penstock.state.run_folder import RunFolder, check_free, locked, new_run_folder, open_run_folder

LEAST_TOGETHER = 256  # tokens: a row is never cut, and most are longer

Tree = TypeVar("Tree", bound=TrainConfig | PairConfig)


@dataclass(frozen=True)
class Kind(Generic[Tree]):
    """What tells the runs of one command from those of the others.

    Attributes:
        name: the command, as the manifest keeps it.
        tree: the class of the configuration.
        check: raises `UserError` for what can be seen before anything waits or starts.
        memory: raises `UserError` where the free memory does not suffice; returns the estimates.
        resumable: what may change when a run goes on.
        model: what its runs leave, by its name under `models/`.
        in_steps: a run counts optimizer steps, in `finetuning/`, and no iterations.
        first: called before a new folder gets its configuration, which makes it a run.
        idle: says what of the given settings such a run never reaches.
        suffix: end of the name of a folder that is made because none is given.
    """

    name: str
    tree: type[Tree]
    check: Callable[[Tree], object]
    memory: Callable[[Tree, Elsewhere], list[GroupEstimate]]
    resumable: Resumable
    model: str = "final"
    in_steps: bool = True
    first: Callable[[RunFolder], object] = lambda _: None
    idle: Callable[[Tree], list[str]] = idle_steps
    suffix: str = ""

    def counted(self, run: RunFolder) -> RunFolder:
        """Return the folder whose manifest says how far a run is."""
        return run.finetuning if self.in_steps else run


def _memory_of_pairs(config: PairConfig, elsewhere: Elsewhere) -> list[GroupEstimate]:
    return check_finetuning_memory(config.engines(), "trainer", isinstance(config, RewardModelConfig), elsewhere)


def _memory_of_sft(config: TrainConfig, elsewhere: Elsewhere) -> list[GroupEstimate]:
    return check_finetuning_memory(config, "sft", elsewhere=elsewhere)


TRAIN = Kind(
    "train",
    TrainConfig,
    check_inputs,
    check_memory,
    OF_TRAIN,
    in_steps=False,
    first=offer_overrides,
    idle=idle_settings,
)
SFT = Kind("sft", TrainConfig, check_supervised, _memory_of_sft, OF_SFT, model="sft", suffix="-sft")
PREFERENCE = Kind("preference", PreferenceConfig, check_preferences, _memory_of_pairs, OF_PAIRS)
REWARD_MODEL = Kind("reward-model", RewardModelConfig, check_preferences, _memory_of_pairs, OF_PAIRS)


@dataclass(frozen=True)
class Resume:
    """Which run is to go on, and how.

    Attributes:
        folder: its run folder.
        start: the checkpoint to go on from, by name; None: the newest that is whole.
        changes: what is to change in its configuration from now on, as `key=value`.
    """

    folder: Path
    start: str | None = None
    changes: Sequence[str] = ()

    @property
    def run(self) -> RunFolder:
        """The run folder.

        Raises:
            UserError: it is none.
        """
        return open_run_folder(self.folder)


def resume_of(
    config: TrainConfig | PairConfig,
    run_folder: str | None,
    resume: str | None,
    start: str | None = None,
    changes: Sequence[str] | None = None,
) -> Resume | None:
    """Return what a flow is to go on with, from the fields of its form; None: its run is new.

    A flow run that Prefect runs once more, because it had crashed or somebody asks for a retry, goes on with the run
    that it has begun.

    Raises:
        UserError: a field is for the other of the two.
        FlowLostTooOften: Prefect has started it again by itself, and it crashed more often than that is done.
    """
    if resume is None and (start is not None or changes):
        raise UserError("a checkpoint and changes are of a run to continue", "say which by 'resume'")
    if resume is not None and run_folder is not None:
        raise UserError(f"{resume} goes on where it is", "take 'run_folder' back")
    crashed = crashes(engines_of(config).engine)
    if (begun := _begun_before(config, run_folder or resume)) is not None:
        if crashed:
            append_flow_lost(RunFolder(begun), "Prefect says that the flow run has crashed")
        return Resume(begun)
    return Resume(Path(resume), start, changes or ()) if resume else None


def _begun_before(config: TrainConfig | PairConfig, named: str | None) -> Path | None:
    """Return the folder of the run that an earlier attempt of this flow run has begun, if there is one."""
    if (flow_run.run_count or 0) <= 1:
        return None
    names = [tag.removeprefix(RUN_TAG) for tag in flow_run.tags or () if tag.startswith(RUN_TAG)]
    places = [Path(named)] if named is not None else [Path(config.folder) / name for name in names]
    return next((place for place in places if RunFolder(place).manifest.is_file()), None)


@contextmanager
def opened(
    kind: Kind[Tree], config: Tree, folder: str | None, resume: Resume | None
) -> Iterator[tuple[Tree, RunFolder]]:
    """Check a configuration and open its run, before anything waits or starts; hold the lock until the context ends.

    Args:
        config: of a new run; one that goes on has its own.
        folder: where a new run is to be; None: in a folder that is made for it.
        resume: which run is to go on; None: a new one begins.

    Yields:
        The configuration that is in force, and the run.

    Raises:
        UserError: the configuration cannot work, the folder is taken, or the run cannot go on so.
    """
    with reading_once():
        if resume is not None:
            with _resumed(kind, resume) as (config, run), _how_to_go_on(kind, run):
                yield config, run
            return
        config = with_models_found(config)
        with _begun(kind, config, folder) as run, _how_to_go_on(kind, run):
            yield config, run


def engines_of(config: TrainConfig | PairConfig) -> TrainConfig:
    """Return what placing and starting of engines look at."""
    return config.engines() if isinstance(config, PairConfig) else config


def foreseen(kind: Kind[Tree], config: Tree) -> tuple[list[GroupEstimate], str]:
    """Return the estimates of a training that would start now, and which GPUs of this machine it would get.

    Raises:
        UserError: it would not fit, also once the GPUs are free that it would wait for.
    """
    engines = engines_of(config)
    pools = gpus_of_pools(engines)
    place(engines, len(visible_gpus()), Path(), pools)  # what the whole machine lacks nobody gives back
    turn = would_get(wanted_by(engines))
    config = deepcopy(config)  # what memory has room for is decided when the training has its GPUs
    said = [turn.text] if turn.text else []
    estimates = sized(kind, config, Elsewhere(pools, {}, turn.mine, turn.others), said.append)
    return estimates, "; ".join(said)


def sized(kind: Kind[Tree], config: Tree, elsewhere: Elsewhere, say: Callable[[str], object]) -> list[GroupEstimate]:
    """Fill in the tokens of micro-batches that a configuration leaves to the memory; return the estimates.

    They are halved until what is free suffices, of all models alike.

    Raises:
        UserError: it does not, however small they are.
    """
    left = [trainer for trainer in trainers(config) if trainer.micro_batch_tokens is None]
    tokens = MOST_TOGETHER
    while left and tokens > LEAST_TOGETHER and not _fits(kind, config, elsewhere, tokens):
        tokens //= 2
    for trainer in left:
        fill(trainer, micro_batch_tokens=tokens)
    estimates = kind.memory(config, elsewhere)
    if left:
        say(f"memory has room for micro-batches of {tokens:,} tokens")
    return estimates


def _fits(kind: Kind[Tree], config: Tree, elsewhere: Elsewhere, tokens: int) -> bool:
    attempt = deepcopy(config)
    for trainer in trainers(attempt):
        fill(trainer, micro_batch_tokens=tokens)
    try:
        kind.memory(attempt, elsewhere)
    except NoRoom:
        return False
    return True


def trainers(config: TrainConfig | PairConfig) -> list[TrainerConfig]:
    """Return the sections of the models that are trained."""
    found = [config.trainer] if isinstance(config, PairConfig) else [config.actor, config.critic, config.sft]
    return [trainer for trainer in found if trainer is not None]


@contextmanager
def _how_to_go_on(kind: Kind[Tree], run: RunFolder) -> Iterator[None]:
    """Add to what ends a deployment's flow run how the training goes on; the command line says it itself."""
    try:
        yield
    except Exception as error:
        if deployment.id and run.manifest.is_file():
            here = f"penstock {kind.name} --resume {quote(str(run.path))}"
            error.add_note(f"It goes on with: {here}, or this deployment with 'resume' {run.path}")
        raise


@contextmanager
def started(kind: Kind[Tree], config: Tree, run: RunFolder) -> Iterator[Training]:
    """Wait for the GPUs, bring the hosts together, check what memory is free then, and start the engine groups.

    Raises:
        UserError: the training needs more GPUs or memory than there are, or a host does not join.
    """
    engines, say = engines_of(config), get_run_logger().info
    with (
        terminations_heard(),
        patient_clients(),
        admission(engines, run.path.name, say) as claims,
        hosted(engines, run, claims) as machines,
    ):
        before = deepcopy(config)
        memory = sized(kind, config, machines.elsewhere, say)
        if config != before:  # a resume has the same micro-batches, and so the same bits
            write_config(run, config)
        with open_session(engines_of(config), run, memory, machines) as training:
            if not training.session().snapshots:
                get_run_logger().warning("%s", describe_snapshots(memory, machines.elsewhere))
            yield training


@contextmanager
def _begun(kind: Kind[Tree], config: Tree, folder: str | None) -> Iterator[RunFolder]:
    kind.check(config)
    run = new_run_folder(Path(config.folder), config.name + kind.suffix, Path(folder) if folder else None)
    with locked(run):
        check_free(run.path)  # another process may have begun since the folder was made
        kind.first(run)
        write_config(run, config)
        for sentence in kind.idle(config):  # of a run that goes on all values are given, also defaults
            get_run_logger().warning("%s", sentence)
        yield run


@contextmanager
def _resumed(kind: Kind[Tree], resume: Resume) -> Iterator[tuple[Tree, RunFolder]]:
    """Make a run whole, change its configuration and check it."""
    run = resume.run
    check_resumable(run, kind.name)
    with locked(run):
        for sentence in mend(run, kind.name, resume.start):
            get_run_logger().warning("%s", sentence)
        check_kind(run, kind.name)
        config, before = _checked(kind, resume), read_config(run, kind.tree)
        if config != before:
            begun = read_progress(kind.counted(run)).progress.iteration > 0
            for sentence in course_changes(before, config, kind.resumable) if begun else ():
                get_run_logger().warning("%s", sentence)
            write_config(run, config)
        yield config, run


def looked_at(kind: Kind[Tree], resume: Resume, remedy: str = ANEW) -> Tree | None:
    """Return the configuration with which a run would go on, so that a command says a mistake before a server starts.

    It only reads: the run becomes this process's own when it is opened, which looks again. None stands for the
    configuration of a damaged run, which is made whole then, and for all that its check would have said.

    Args:
        remedy: what to do with a run that was never far enough to be resumed.

    Raises:
        UserError: it is being trained, was made by another command, or cannot go on so.
    """
    check_resumable(resume.run, kind.name, remedy)
    try:
        return _checked(kind, resume)
    except Damaged:
        return None


def is_complete(kind: Kind[Tree], resume: Resume) -> bool:
    """Whether nothing of a run is left to do; a damaged folder never says so."""
    if resume.start is not None:
        return False
    run = resume.run
    check_kind(run, kind.name)
    try:
        length = kind.resumable.length(_changed(kind, resume))
        return completed(run, length, kind.counted(run), kind.model)
    except Damaged:
        return False


def left_as_it_is(kind: Kind[Tree], resume: Resume | None) -> RunFolder | None:
    """Return the run of a flow if nothing is left to do in it, and say so: no engine starts, nothing is written."""
    if resume is None or not is_complete(kind, resume):
        return None
    run = resume.run
    get_run_logger().info("%s is complete: nothing is left to do; its report is %s", run.path, run.report)
    return run


def _checked(kind: Kind[Tree], resume: Resume) -> Tree:
    with reading_once():
        if resume.start:
            checkpoint_named(resume.run, resume.start)
        config = _changed(kind, resume)
        kind.check(config)
        check_tokenized(resume.run, config)
    return config


def _changed(kind: Kind[Tree], resume: Resume) -> Tree:
    """Return the configuration of a run with what is to change in it from now on.

    Raises:
        Damaged: the configuration or the manifest is not what was written.
        UserError: a change is not possible, or nothing is there to go on from.
    """
    run = resume.run
    config = read_config(run, kind.tree)
    if not resume.changes:
        return config
    saved = read_progress(kind.counted(run))
    if saved.checkpoint is None and ended(run, kind.model):
        raise UserError(f"{run.path} is complete and has no checkpoint to go on from", "start a new run")
    return resumed_config(config, resume.changes, saved.progress.iteration, kind.resumable)
