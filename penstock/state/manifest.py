"""The manifest: one small JSON file that says from where a resume continues.

It moves only after everything that it names is complete on disk: a checkpoint is written aside, hashed, fsynced and
renamed, and then the manifest is replaced in one step. A crash at any instant leaves the old manifest with its old
checkpoint, or the new one with the new. A checkpoint holds the manifest that names it, so that a run can go on from any
of them (penstock/state/mending.py). Left out: the weights inside a checkpoint (penstock/engines/training/trainer.py
writes them).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from penstock.base.errors import UserError
from penstock.base.files import discard, files_below, for_each_file, settle, sha256, write_text
from penstock.state.deferred import Deferred
from penstock.state.digests import DIGEST, Damaged, read_sealed, write_sealed
from penstock.state.run_folder import RunFolder, locked, read_metrics

FORMAT = 3
HASHES = "sha256.json"
ANEW = "start it anew with its config.yaml, by the command that began it, in another folder"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, apart from the weights: all of it changes only between iterations."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    iteration: int = 0
    policy_version: int = 0
    prompt_cursor: int = 0  # ordinal of the next prompt; epochs follow from the data's size (penstock/data/order.py)
    kl_coefficient: float | None = None  # state of the adaptive controller
    seconds: float = 0.0  # of earlier attempts
    overrides: dict[str, Any] | None = None  # live settings in force
    deferred: tuple[Deferred, ...] = ()  # prompts that were drawn and wait, those drawn first before others

    def advanced(self, **changes: Any) -> Progress:
        """Return a copy with `changes`."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Tracked:
    """The run of a tracker in which a training is recorded, besides its folder.

    Attributes:
        tracker: as the configuration names it.
        run: what the tracker calls the run.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tracker: str
    run: str


def _all_of_them(tracked: Any) -> Any:
    """Runs that were begun when there was one tracker say which it was, or null; also in their checkpoints."""
    if tracked is None:
        return ()
    return (tracked,) if isinstance(tracked, dict) else tracked


@dataclass(frozen=True)
class Manifest:
    """A run's progress, its checkpoint and its links."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    progress: Progress
    checkpoint: str | None = None  # folder name under checkpoints/
    model: str | None = None  # folder with the architecture and tokenizer that the actor started from
    tracked: Annotated[tuple[Tracked, ...], BeforeValidator(_all_of_them)] = ()  # the main tracker's first
    prefect_flow_run_id: str | None = None
    kind: str | None = None  # the command that made the run, e.g. "sft"; None: of a version that did not say
    trained_with: dict[str, int | str] | None = (
        None  # of a training on preferences (penstock/tasks/finetuning/record.py)
    )


_SHAPE = TypeAdapter(Manifest)


def write_manifest(run: RunFolder, manifest: Manifest) -> None:
    """Replace the manifest atomically."""
    write_sealed(run.manifest, {"format": FORMAT, **asdict(manifest)})


def read_manifest(run: RunFolder, remedy: str = ANEW) -> Manifest:
    """Return the manifest of `run`, or that of a checkpoint's folder taken as a run's.

    Args:
        remedy: what to do where there is none.

    Raises:
        Damaged: it is not what was written.
        UserError: it is missing or was written by another format.
    """
    if not run.manifest.is_file():
        raise _never_began(run, remedy)
    _refuse_other_formats(run.manifest)
    values = read_sealed(run.manifest, f"'--resume {run.path}' sets it aside and goes on from the newest checkpoint")
    if (found := values.pop("format", None)) != FORMAT:
        raise _of_another_format(run.manifest, found)
    try:
        return _SHAPE.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{run.manifest} is damaged: {where}: {first['msg']}", ANEW) from None


def _never_began(run: RunFolder, remedy: str) -> UserError:
    return UserError(f"{run.path} ended before its engines were up: there is no manifest.json to resume from", remedy)


def _refuse_other_formats(path: Path) -> None:
    """Tell a manifest of a version without digests, which is whole, from one of ours that is damaged."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict) and DIGEST not in values and values.get("format", FORMAT) != FORMAT:
        raise _of_another_format(path, values["format"])


def _of_another_format(path: Path, found: Any) -> UserError:
    return UserError(f"{path} has format {found}, this version reads {FORMAT}", "resume with the version that wrote it")


def read_kind(run: RunFolder) -> str | None:
    """Return the command that made a run; None: it has no manifest that says so, or a damaged one."""
    try:
        return read_manifest(run).kind if run.manifest.is_file() else None
    except Damaged:
        return None


def check_kind(run: RunFolder, kind: str) -> None:
    """Refuse a run that another command made; one without a manifest is of no kind yet.

    Args:
        kind: "train", "sft", "preference" or "reward-model".

    Raises:
        UserError: it is another's.
    """
    made = read_kind(run)  # of a damaged one a resume finds out from its checkpoints, once the run is its own
    if made not in (None, kind):
        raise UserError(
            f"{run.path} is a run of 'penstock {made}', not of 'penstock {kind}'",
            f"it goes on with 'penstock {made} --resume {run.path}'",
        )


def check_resumable(run: RunFolder, kind: str, remedy: str = ANEW) -> None:
    """Refuse a run that another process trains, that another command made, or that never got far enough to be resumed.

    Args:
        remedy: what to do with a run that never got far enough.

    Raises:
        UserError: says which.
    """
    check_kind(run, kind)
    if run.lock.exists():  # asking leaves no file where no training ever was
        with locked(run):
            pass
    if not run.manifest.is_file() and not any(run.checkpoints.glob("[0-9]*")):
        raise _never_began(run, remedy)


def read_progress(counted: RunFolder) -> Manifest:
    """Return the manifest that says how far a run is; where there is none yet, that of its beginning."""
    return read_manifest(counted) if counted.manifest.is_file() else Manifest(Progress())


def completed(run: RunFolder, length: int, counted: RunFolder | None = None, model: str = "final") -> bool:
    """Whether nothing of `run` is left to do: all iterations or steps done, the model written, its end recorded.

    A manifest counts up to the last checkpoint; a run without checkpoints is complete if its end says so.

    Args:
        length: iterations or steps asked for.
        counted: the folder whose manifest counts; None: that of the run.
        model: what the run leaves, under `models/`.
    """
    if not ended(run, model):
        return False
    saved = read_progress(counted or run)
    return saved.checkpoint is None or saved.progress.iteration >= length


def ended(run: RunFolder, model: str = "final") -> bool:
    """Whether the model of `run` is written and its summary, which comes last of all, says that it is complete."""
    if not run.model(model).exists() or not run.summary.is_file():
        return False
    try:
        summary = json.loads(run.summary.read_bytes())
    except (ValueError, RecursionError):  # damaged: a resume writes it anew
        return False
    return isinstance(summary, dict) and summary.get("status") == "completed"


def seal_checkpoint(aside: Path, final: Path, run: RunFolder, manifest: Manifest) -> int:
    """Add what a run needs besides the engines' state, hash and fsync all, then rename it to `final`.

    A run goes on from a checkpoint alone: its manifest, configuration and what its sampler remembers are in it.

    Returns:
        The bytes of the engines' state.
    """
    size = sum(path.stat().st_size for path in files_below(aside))
    accompany(aside, run, manifest)
    name_checkpoint(aside, final, {})
    return size


def accompany(aside: Path, run: RunFolder, manifest: Manifest) -> None:
    """Add to a checkpoint what a run needs besides the engines' state, as it is now."""
    write_manifest(RunFolder(aside), manifest)
    for path in (run.config, run.prompt_rewards):
        if path.is_file():
            shutil.copyfile(path, aside / path.name)


def name_checkpoint(aside: Path, final: Path, hashes: Mapping[str, str]) -> None:
    """Hash and fsync what is in a checkpoint's folder, then rename it to `final`.

    Args:
        hashes: of files that are on the disk already.
    """
    write_hashes(aside, hashes)
    settle(aside, final)


def write_hashes(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Hash every file under `folder`, side by side, into `sha256.json`: names relative to it.

    Args:
        known: hashes of files that whoever wrote them has taken.
    """
    hashes = dict(known or {})
    paths = {str(path.relative_to(folder)): path for path in files_below(folder)}
    others = {name: path for name, path in paths.items() if name not in hashes}
    hashes |= zip(others, for_each_file(list(others.values()), sha256), strict=True)
    write_text(folder / HASHES, json.dumps(dict(sorted(hashes.items())), indent=1))


def verify_hashes(folder: Path, remedy: str = "") -> None:
    """Compare every file of a folder with its recorded hash.

    Raises:
        Damaged: a file is missing, altered, or not of those that were hashed.
    """
    try:
        recorded = json.loads((folder / HASHES).read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
        raise Damaged(f"{folder} is incomplete: {HASHES} {why}", remedy) from None
    paths = {str(path.relative_to(folder)): path for path in files_below(folder) if path != folder / HASHES}
    if not isinstance(recorded, dict) or not recorded:
        raise Damaged(f"{folder} is incomplete: {HASHES} names no file", remedy)
    if odd := sorted(recorded.keys() ^ paths.keys()):
        what = "is missing" if odd[0] in recorded else "is none of the files that were written"
        raise Damaged(f"{folder} is damaged: {odd[0]} {what}", remedy)
    found = for_each_file(list(paths.values()), _readable_hash)
    for (name, path), there in zip(paths.items(), found, strict=True):
        if there != recorded[name]:
            raise Damaged(f"{path} is damaged", remedy)


def _readable_hash(path: Path) -> str | None:
    try:
        return sha256(path)
    except OSError:  # the disk cannot read it
        return None


def verify_checkpoint(folder: Path, remedy: str = "") -> Manifest:
    """Check a checkpoint of a run, file by file; return the manifest in it.

    Raises:
        Damaged: it is not what was written.
    """
    verify_hashes(folder, remedy)
    own = RunFolder(folder)
    if not own.manifest.is_file():
        raise Damaged(f"{folder} is incomplete: {own.manifest.name} is missing", remedy)
    manifest = read_manifest(own)
    if manifest.checkpoint != folder.name:
        raise Damaged(f"{folder} holds the manifest of checkpoint {manifest.checkpoint}", remedy)
    return manifest


def prune_checkpoints(run: RunFolder, keep: int, named: str | None, best: str | None = None) -> None:
    """Keep the newest `keep` checkpoints up to the manifest's, `named`, and the one that is `best`.

    The others are deleted, and half-written ones. A checkpoint newer than the manifest's was sealed by an attempt that
    was killed before the manifest named it: a resume makes it anew. If the manifest names none, all are deleted.

    Args:
        best: figure whose highest value is best; after the word 'lowest', its lowest.
    """
    sealed = sorted(run.checkpoints.glob("[0-9]*"))
    possible = [path for path in sealed if named is not None and path.name <= named]
    kept = [*possible[-keep:], *_best(run, possible, best)]
    for path in [*sealed, *run.checkpoints.glob(".*.partial")]:
        if path not in kept:
            shutil.rmtree(path)


def _best(run: RunFolder, checkpoints: Sequence[Path], wanted: str | None) -> list[Path]:
    """Return the checkpoint whose iteration has the best value of a figure, the newest of several; or none."""
    if wanted is None:
        return []
    *order, figure = wanted.split()
    sign = -1.0 if order == ["lowest"] else 1.0
    values = {f"{record['iteration']:06d}": record["metrics"].get(figure) for record in read_metrics(run)}
    measured = [path for path in checkpoints if values.get(path.name) is not None]
    return sorted(measured, key=lambda path: (sign * values[path.name], path.name))[-1:]


def reopen(run: RunFolder, model: str = "final") -> None:
    """Take back the end of `run`, if it has one: its model is of an earlier attempt or of a shorter training."""
    run.summary.unlink(missing_ok=True)  # first, so that nothing without its model calls itself complete
    discard(run.model(model))
