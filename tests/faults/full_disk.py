"""A program: fills a small disk of its own, lets each place that writes try, makes room, and lets it try again.

    unshare -rm python -m tests.faults.full_disk FOLDER

It mounts a file system of a few MiB on FOLDER, which only it sees, and prints what came of each place as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from penstock.base.files import filling, write_text
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.reports.report import write_report
from penstock.session.session import write_config
from penstock.state.experience import add_columns, column_names, consolidate, write_columns, write_columns_apart
from penstock.state.manifest import Manifest, Progress, read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics, read_metrics

DISK = "16m"
ROWS = 4096
TOKENS = Ragged.of([range(64)] * ROWS, np.int32)
EXPERIENCE = {"response_tokens": TOKENS, "reward": np.random.default_rng(0).random(ROWS)}


@dataclass(frozen=True)
class Place:
    """Something that a run writes.

    Attributes:
        write: writes it.
        read: returns what a reader sees of it, the same before and after an attempt that failed.
        before: makes what has to be there.
    """

    write: Callable[[RunFolder], object]
    read: Callable[[RunFolder], object]
    before: Callable[[RunFolder], object] = lambda run: None


@dataclass(frozen=True)
class Outcome:
    """What came of a place: the error on the full disk, whether a reader saw no change, whether it worked with room."""

    error: str
    unchanged: bool
    works_again: bool


def _export(run: RunFolder) -> None:
    with filling(run.model("final")) as aside:
        (aside / "model.safetensors").write_bytes(bytes(1 << 20))


def _record(run: RunFolder) -> None:
    write_config(run, TrainConfig())
    append_metrics(run, 1, {"reward/mean": 0.5})


def _columns(run: RunFolder) -> object:
    path = run.experience(1)
    return sorted(column_names(path)) if path.exists() else None


def _begin_experience(run: RunFolder) -> None:
    write_columns(run.experience(1), EXPERIENCE)


def _begin_parts(run: RunFolder) -> None:
    write_columns_apart(run.experience(1), EXPERIENCE)


PLACES = {
    "config": Place(
        lambda run: write_config(run, TrainConfig(seed=2)),
        lambda run: run.config.read_text(),
        lambda run: write_config(run, TrainConfig(seed=1)),
    ),
    "manifest": Place(
        lambda run: write_manifest(run, Manifest(Progress(iteration=2))),
        lambda run: read_manifest(run).progress.iteration,
        lambda run: write_manifest(run, Manifest(Progress(iteration=1))),
    ),
    "metrics": Place(
        lambda run: append_metrics(run, 2, {f"figure/{number}": 0.5 for number in range(500)}),
        lambda run: [line["iteration"] for line in read_metrics(run)],
        lambda run: append_metrics(run, 1, {"reward/mean": 0.5}),
    ),
    "samples": Place(
        lambda run: write_text(run.samples(1), "[]" * 5000),
        lambda run: run.samples(1).exists(),
        lambda run: run.samples(1).parent.mkdir(parents=True),
    ),
    "rollout": Place(_begin_parts, _columns),
    "column": Place(lambda run: add_columns(run.experience(1), {"advantages": TOKENS}), _columns, _begin_experience),
    "consolidation": Place(lambda run: consolidate(run.experience(1)), _columns, _begin_parts),
    "model": Place(_export, lambda run: run.model("final").exists()),
    "report": Place(
        lambda run: write_report(run.path, {}), lambda run: (run.path / "report" / "index.html").exists(), _record
    ),
}


def tried(place: Place, run: RunFolder) -> Outcome:
    """Try on a full disk, and on one with room."""
    run.path.mkdir()
    place.before(run)
    seen, error = place.read(run), "none"
    with full(run.path.parent / "ballast"):
        try:
            place.write(run)
        except OSError as found:
            error = str(found)
        unchanged = place.read(run) == seen
    place.write(run)
    return Outcome(error, unchanged, place.read(run) != seen or place is PLACES["consolidation"])


@contextmanager
def full(ballast: Path) -> Iterator[None]:
    """Let a file take all room that is left, for as long as the block lasts."""
    with ballast.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        ballast.unlink()


def main() -> None:
    """Mount, try each place, print."""
    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    print(json.dumps({name: asdict(tried(place, RunFolder(folder / name))) for name, place in PLACES.items()}))


if __name__ == "__main__":
    main()
