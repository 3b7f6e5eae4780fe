"""Seconds that making the trained state durable holds up a training, and that it takes behind its back.

    snapshot_held_s     the command to take a snapshot, after which the next rollout begins
    snapshot_whole_s    until every rank has finished it
    write_s             until the hosts have copied it to files, with hashes, and the disk has them
    ranks_held_s        a checkpoint that the ranks write themselves, with hashes and on the disk

Beside them, of the same state on the same disk, `torch.distributed.checkpoint.async_save` (`torch_held_s`,
`torch_written_s`) and DeepSpeed's `save_checkpoint` (`deepspeed_held_s`), neither with hashes nor with a wait for the
disk.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import empty_beside
from penstock.benchmarks.ranks.saving_rank import SaveBy
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, groups_of, load_roles
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.checkpoint import Save
from penstock.engines.sizing.memory import GIB
from penstock.session.session import Session
from penstock.state.manifest import name_checkpoint

LOOK_S = 0.005
WORKER = "penstock.benchmarks.ranks.saving_rank:SavingWorker"
FIGURES = ("snapshot_held_s", "snapshot_whole_s", "write_s", "ranks_held_s")
PEERS = ("torch_held_s", "torch_written_s", "deepspeed_held_s")


def measure(config: TrainConfig, command: str, folder: Path, *, rounds: int, skip: int) -> BenchResult:
    """Save the actor's state `rounds` times in each way; return the medians after the first `skip`.

    Args:
        folder: of the files, which are deleted; its disk is what is measured.

    Raises:
        UserError: the hosts' memory has no room for snapshots.
    """
    steady(range(rounds), skip)
    with groups_of(config) as (training, progress):
        session = training.session()
        if not session.snapshots:
            raise UserError("the hosts' memory has no room for snapshots", "measure a smaller model")
        specs = [replace(group.spec, worker=WORKER) for group in session.distinct_groups]
        session.end_groups(grace_s=0.0)
        session.start_groups(specs, epoch=1)
        load_roles(training, ("actor",))
        progress.start(rounds)
        rows = []
        for number in range(1, rounds + 1):
            rows.append(_round(session, number, folder / f"{number:06d}"))
            progress.advance(number, rows[-1])
    names = (*FIGURES, *PEERS, "state_gib")
    figures = medians(steady(rows, skip), dict(zip(names, names, strict=True)))
    settings = {"rounds": rounds, "skipped": skip} | describe(config)
    return new_result("checkpoint", command, figures, settings=settings, details=rows)


def _round(session: Session, number: int, folder: Path) -> dict[str, float]:
    """Save in every way, one after the other, each into an empty folder."""
    began = time.perf_counter()
    session.take_snapshot("iteration", number)
    row = {"snapshot_held_s": time.perf_counter() - began}
    while session.newest_snapshot("iteration") != number:
        time.sleep(LOOK_S)
    row["snapshot_whole_s"] = time.perf_counter() - began
    aside = empty_beside(folder)
    state = session.written_state("iteration", number, aside)
    row |= {"write_s": state.seconds, "state_gib": state.size / GIB}

    began = time.perf_counter()
    aside = empty_beside(folder)
    session.call("actor", Save(str(aside)), f"{number}/save")
    name_checkpoint(aside, folder, {})
    row["ranks_held_s"] = time.perf_counter() - began
    shutil.rmtree(folder)
    for library in ("torch", "deepspeed"):
        aside = empty_beside(folder)
        saved = session.call("actor", SaveBy(library, str(aside)), f"{number}/{library}")
        row[f"{library}_held_s"] = max(rank.held_s for rank in saved)
        row[f"{library}_written_s"] = max(rank.written_s for rank in saved)
        shutil.rmtree(aside)
    return row
