"""A chain that runs in this process: its folder is locked, and each stage is told of as it begins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.configs.chain import Stage
from penstock.session.chains.plan import CHAIN_TAG, read_chain_of
from penstock.session.flow_runs.saying import say
from penstock.session.flow_runs.taken_over import take_over
from penstock.state.chain import ChainFolder
from penstock.state.run_folder import RunFolder, locked


@contextmanager
def running_chain(folder: ChainFolder) -> Iterator[None]:
    """Keep other processes from the chain until the block ends.

    Raises:
        UserError: there is no chain, or another process is at it.
    """
    read_chain_of(folder)
    with locked(RunFolder(folder.path)):
        take_over(folder.path, f"{CHAIN_TAG}{folder.path.name}")
        yield


def say_stage(folder: ChainFolder, stage: Stage) -> None:
    """Say which stage comes now."""
    stages = read_chain_of(folder).stages
    goes_on = "goes on" if folder.run(stage).manifest.is_file() else "begins"
    say(f"stage {stages.index(stage) + 1} of {len(stages)}, {stage.name} ({stage.does}), {goes_on}")


def unbegun(folder: ChainFolder, stage: Stage) -> bool:
    """Whether a stage begins anew; what one has left that ended before there was anything to go on with is removed."""
    run = folder.run(stage)
    if run.manifest.is_file():
        return False
    shutil.rmtree(run.path, ignore_errors=True)
    return True
