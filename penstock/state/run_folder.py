"""The run folder: one directory that holds all that is durable about a training.

    config.yaml        resolved configuration          manifest.json   where a resume continues (manifest.py)
    data/              tokenized prompts               metrics.jsonl   lines of iterations
    models/            models made by the run          summary.json    written at the end, also of a failed run
    experience/        000012.parquet, hidden parts;   logs/           of each rank; prints of rewards
                       000012.carried.parquet,
                       while it rolls out 000012.ended.arrows
    checkpoints/       000010/                         report/         pictures and pages
    events.jsonl       what was lost meanwhile         finetuning/     newest checkpoint and manifest of
                                                                       offline training
    faults/            batches of odd numbers

The folder is the truth; a tracker and Prefect are views of it. Left out: what the files mean to the algorithms.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.base.files import append_text, check_possible, write_text
from penstock.state.digests import Damaged, sealed, set_aside, unsealed
from penstock.state.experience import drop_experience


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Creating the object touches nothing on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name: the last part of its path."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def manifest(self) -> Path:
        """The record of the last complete checkpoint."""
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        """A JSON line per recorded iteration, and a further line with figures that are measured after the record."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """A JSON line for what was lost while the run went on, and for how it went on (events.py)."""
        return self.path / "events.jsonl"

    @property
    def prompt_rewards(self) -> Path:
        """One JSON line per iteration, where the sampler chooses prompts by what they earned."""
        return self.path / "prompts.jsonl"

    @property
    def summary(self) -> Path:
        """The result of the run."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The first page of the report."""
        return self.path / "report" / "index.html"

    @property
    def lock(self) -> Path:
        """Locked by the process that writes to the run."""
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        """One log file per rank, and what a reward function prints."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def finetuning(self) -> RunFolder:
        """Manifest and checkpoints of supervised or preference training, counted in steps; gone when it is over."""
        return RunFolder(self.path / "finetuning")

    @property
    def warm_up(self) -> RunFolder:
        """Figures of the supervised warm-up of `train`; among the others its steps would be taken for iterations."""
        return RunFolder(self.path / "warm_up")

    def prompts(self, split: str) -> Path:
        """Tokenized prompts of a split ("train", "heldout", "sft")."""
        return self.path / "data" / f"{split}.parquet"

    @property
    def images(self) -> Path:
        """The images that rows name, each under its digest (penstock/data/images.py)."""
        return self.path / "data" / "images"

    def model(self, name: str) -> Path:
        """A model made by this run ("initial", "sft", "final", "export")."""
        return self.path / "models" / name

    def experience(self, iteration: int) -> Path:
        """Experience of one iteration."""
        return self.path / "experience" / f"{iteration:06d}.parquet"

    def experiences(self) -> list[Path]:
        """The experience files that are there, by iteration."""
        return sorted(self.experience(0).parent.glob("[0-9]*[0-9].parquet"))

    def carried(self, iteration: int) -> Path:
        """Responses that the rollout of one iteration left unfinished (penstock/session/rollout/carried.py)."""
        return self.path / "experience" / f"{iteration:06d}.carried.parquet"

    def ended(self, iteration: int) -> Path:
        """Responses that have ended while the rollout of one iteration goes on (penstock/session/rollout/ended.py)."""
        return self.path / "experience" / f"{iteration:06d}.ended.arrows"

    def faulty(self, iteration: int) -> Path:
        """The experience of an iteration with a numerical fault, kept; beside it, as JSON, what the fault was."""
        return self.path / "faults" / f"{iteration:06d}.parquet"

    def samples(self, iteration: int) -> Path:
        """A table of samples of one iteration, for people (penstock/trackers/tracker.py)."""
        return self.path / "samples" / f"{iteration:06d}.json"

    def evaluation(self, iteration: int) -> Path:
        """Held-out responses after `iteration` (0: before training)."""
        return self.path / "evaluation" / f"{iteration:06d}.parquet"

    def checkpoint(self, iteration: int) -> Path:
        """The state after `iteration`."""
        return self.checkpoints / f"{iteration:06d}"


def new_run_folder(parent: Path, name: str, explicit: Path | None = None) -> RunFolder:
    """Create an empty run folder: `explicit`, or `parent/name-YYYYmmdd-HHMMSS` (with a counter when taken).

    Raises:
        UserError: the explicit folder already holds a run or anything else, or nothing can be made there.
    """
    if explicit is not None:
        check_free(explicit)
    check_place(explicit or parent)
    (explicit or parent).mkdir(parents=True, exist_ok=True)
    if explicit is not None:
        return RunFolder(explicit.resolve())
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        candidate = parent / f"{name}-{stamp}{suffix}"
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return RunFolder(candidate.resolve())
    raise UserError(f"{parent} holds a thousand runs of this second", "start again in a moment")


def drop_if_empty(path: Path) -> None:
    """Remove a run folder to which nothing was written."""
    if path.is_dir() and _is_empty(path):
        RunFolder(path).lock.unlink(missing_ok=True)
        path.rmdir()


def _is_empty(path: Path) -> bool:
    """Whether a folder holds nothing, but for the lock of a process that has written nothing there."""
    return all(entry == RunFolder(path).lock for entry in path.iterdir())


def check_free(path: Path) -> None:
    """Refuse a folder that holds another run or other files.

    Raises:
        UserError: `path` exists and is not an empty folder.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a folder for a run", "name another folder")
    if (path / "config.yaml").exists():
        if RunFolder(path).manifest.is_file():
            raise UserError(
                f"{path} already holds a run", f"continue it with '--resume {path}', or name another folder"
            )
        raise UserError(
            f"{path} already holds a run, which has nothing to resume yet: it is starting, or ended while it did",
            "name another folder",
        )
    if not _is_empty(path):
        raise UserError(f"{path} is not empty", "name an empty or a new folder")


def check_place(path: Path) -> None:
    """Refuse a place where a run folder cannot be made.

    Raises:
        UserError: says why it cannot.
    """
    check_possible(path, f"the run folder {path}", "name another with folder=..., or with --run")


def open_run_folder(path: Path) -> RunFolder:
    """Return the folder of an existing run.

    Raises:
        UserError: there is no run at `path`.
    """
    if not (path / "config.yaml").is_file():
        raise UserError(
            f"{path} holds no run (no config.yaml in it)",
            "name the folder that a training printed at its start; if it was stopped before it wrote there, give its "
            "command again",
        )
    return RunFolder(path.resolve())


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep other processes from writing to the run; the lock ends with the process, however that ends.

    Raises:
        UserError: another process is training in this folder.
    """
    with run.lock.open("a") as stream:  # who only asks changes nothing, not even its time
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run.path} is being trained by another process", "wait for it, or end it") from None
        yield


def append_metrics(run: RunFolder, iteration: int, metrics: dict[str, float]) -> None:
    """Append a line of one iteration and make it durable; a second one adds figures to the first."""
    append_steps(run, {iteration: metrics})


def append_steps(run: RunFolder, steps: dict[int, dict[str, float]]) -> None:
    """Append a line of each step, or iteration, and make them durable together."""
    lines = "".join(sealed({"iteration": step, "metrics": metrics}) + "\n" for step, metrics in steps.items())
    append_text(run.metrics, lines)


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """Return the recorded iterations in order, each once; a last line cut by a crash is left out.

    Raises:
        Damaged: a line is not what was written.
    """
    whole, wrong = _metrics_lines(run)
    if wrong:
        lines = ", ".join(map(str, wrong))
        raise Damaged(f"{run.metrics} is damaged in line {lines}", "a resume of the run sets it aside, and goes on")
    records: dict[int, dict[str, Any]] = {}
    for record in whole:
        records.setdefault(record["iteration"], {**record, "metrics": {}})["metrics"] |= record["metrics"]
    return list(records.values())


def damaged_metrics(run: RunFolder) -> list[int]:
    """Return the numbers of the lines that are not what was written, from 1 on."""
    return _metrics_lines(run)[1]


def keep_whole_metrics(run: RunFolder) -> Path:
    """Keep the whole lines alone; return the path that the file with damaged lines was set aside to."""
    whole, _ = _metrics_lines(run)
    aside = set_aside(run.metrics)
    write_text(run.metrics, "".join(sealed(record) + "\n" for record in whole))
    return aside


def _metrics_lines(run: RunFolder) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the whole lines and the numbers of damaged ones; a last line that a crash cut is in neither."""
    if not run.metrics.exists():
        return [], []
    *lines, cut = run.metrics.read_bytes().split(b"\n")
    if cut and _record(cut[:-1]):  # the whole record is there, so only its line's end is damaged
        lines.append(cut[:-1])
    records = [_record(line) for line in lines]
    return [record for record in records if record], [n for n, record in enumerate(records, 1) if not record]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        return unsealed(line.decode())
    except (ValueError, RecursionError):
        return None


def truncate_metrics(run: RunFolder, iteration: int) -> None:
    """Drop the lines after `iteration`, and one cut by a crash: a resumed run writes them again."""
    kept = [record for record in read_metrics(run) if record["iteration"] <= iteration]
    write_text(run.metrics, "".join(sealed(record) + "\n" for record in kept))


def drop_partial(run: RunFolder) -> None:
    """Drop what a crash left half-written."""
    for path in [*run.path.rglob("*.partial")]:  # of a folder, also what is half-written in it
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def drop_lost_experience(run: RunFolder, iteration: int) -> None:
    """Drop experience of policies that a crash has lost.

    The experience of the iteration after `iteration` stays: it comes from the policy that is restored. So do responses
    that have ended of the rollout after that, which may have begun before the update; it looks at their policies.
    """
    for path in run.experience(0).parent.glob("[0-9]*"):
        if int(path.name.partition(".")[0]) > iteration + 1 and path != run.ended(iteration + 2):
            drop_experience(path)
