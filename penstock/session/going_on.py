"""How a run is opened, anew or to go on: with its lock, and nothing is written before that is held.

Two processes may be told to go on with one run. The second is refused, and has changed nothing. Left out: what a run
does once it is open (flows/), what makes a damaged folder whole (penstock/state/mending.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prefect import get_run_logger

from configs.loading.resuming import resumed_config
from configs.preference import PairConfig
from configs.schema import TrainConfig
from penstock.base.errors import UserError
from penstock.checks.tokenized import check_tokenized
from penstock.data.source import reading_once
from penstock.session.session import read_config, write_config
from penstock.state.digests import Damaged
from penstock.state.manifest import check_kind, check_resumable, completed, ended, read_manifest
from penstock.state.mending import mend
from penstock.state.run_folder import RunFolder, check_free, locked, new_run_folder, open_run_folder

Tree = TypeVar("Tree", TrainConfig, PairConfig)


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


@contextmanager
def new_run(
    config: Tree,
    check: Callable[[Tree], object],
    name: str,
    folder: str | None,
    first: Callable[[RunFolder], object] | None = None,
) -> Iterator[RunFolder]:
    """Check a configuration, open a run folder for it, and hold its lock until the context ends.

    Args:
        name: of a folder that is made because none is given.
        folder: where the run is to be.
        first: what is to be done before the folder has a configuration, which makes it a run.

    Raises:
        UserError: the configuration cannot work, or the folder is taken.
    """
    with reading_once():
        check(config)
        run = new_run_folder(Path(config.folder), name, Path(folder) if folder else None)
        with locked(run):
            check_free(run.path)  # another process may have begun since the folder was made
            if first is not None:
                first(run)
            write_config(run, config)
            yield run


@contextmanager
def resumed_run(
    resume: Resume, kind: str, tree: type[Tree], check: Callable[[Tree], object]
) -> Iterator[tuple[Tree, RunFolder]]:
    """Make a run whole, change its configuration, check it, and hold its lock until the context ends.

    Args:
        kind: the command that makes such runs.
        tree: the configuration's class.

    Raises:
        UserError: it is being trained, was made by another command, has no whole state, or cannot go on so.
    """
    run = resume.run
    check_resumable(run, kind)
    with locked(run), reading_once():
        for sentence in mend(run, kind, resume.start):
            get_run_logger().warning("%s", sentence)
        check_kind(run, kind)
        config = changed_config(run, tree, resume.changes)
        check(config)
        check_tokenized(run, config)
        if config != read_config(run, tree):
            write_config(run, config)
        yield config, run


def changed_config(run: RunFolder, tree: type[Tree], changes: Sequence[str]) -> Tree:
    """Return the configuration of a run with what is to change in it from now on.

    Raises:
        Damaged: it, or the manifest, is not what was written.
        UserError: a change is not possible, or nothing is there to go on from.
    """
    config = read_config(run, tree)
    if not changes or not isinstance(config, TrainConfig):
        return config
    saved = read_manifest(run)
    if saved.checkpoint is None and ended(run):
        raise UserError(f"{run.path} is complete and has no checkpoint to go on from", "start a new run")
    return resumed_config(config, changes, saved.progress.iteration)


def is_complete(resume: Resume) -> bool:
    """Whether nothing of a training is left to do; a damaged folder never says so."""
    if resume.start is not None:
        return False
    run = resume.run
    check_kind(run, "train")
    try:
        return completed(run, changed_config(run, TrainConfig, resume.changes).iterations)
    except Damaged:
        return False
