"""The manifest: one small JSON file that says from where a resume continues.

It moves only after everything that it names is complete on disk: a checkpoint is written aside, hashed, fsynced
and renamed, and then the manifest is replaced in one step. A crash at any instant leaves the old manifest with its
old checkpoint, or the new one with the new. Left out: what is inside a checkpoint (engines/trainer.py writes it).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import UserError
from state.files import discard, files_below, for_each_file, settle, sha256, write_text
from state.run_folder import RunFolder, locked

FORMAT = 1
ANEW = "start it anew with its config.yaml, by the command that began it, in another folder"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, apart from the weights: all of it changes only between iterations."""

    iteration: int = 0
    policy_version: int = 0
    prompt_cursor: int = 0  # ordinal of the next prompt; epochs follow from the data's size (data/order.py)
    kl_coefficient: float | None = None  # state of the adaptive controller
    seconds: float = 0.0  # of earlier attempts
    overrides: dict[str, Any] | None = None  # live settings in force

    def advanced(self, **changes: Any) -> Progress:
        """Return a copy with `changes`."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Manifest:
    """A run's progress, its checkpoint and its links."""

    progress: Progress
    checkpoint: str | None = None  # folder name under checkpoints/
    model: str | None = None  # folder with the architecture and tokenizer that the actor started from
    mlflow_run_id: str | None = None
    prefect_flow_run_id: str | None = None
    kind: str | None = None  # the command that made the run, e.g. "sft"; None: of a version that did not say
    trained_with: dict[str, int | str] | None = None  # of a training on preferences (tasks/preference_record.py)


def write_manifest(run: RunFolder, manifest: Manifest) -> None:
    """Replace the manifest atomically."""
    write_text(run.manifest, json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2) + "\n")


def read_manifest(run: RunFolder, remedy: str = ANEW) -> Manifest:
    """Return the manifest of `run`.

    Args:
        remedy: what to do where there is none.

    Raises:
        UserError: it is missing or was written by another format.
    """
    if not run.manifest.is_file():
        raise UserError(
            f"{run.path} ended before its engines were up: there is no manifest.json to resume from",
            remedy,
        )
    values = json.loads(run.manifest.read_text(encoding="utf-8"))
    if (found := values.pop("format", None)) != FORMAT:
        raise UserError(
            f"{run.manifest} has format {found}, this version reads {FORMAT}", "resume with the version that wrote it"
        )
    progress = values.pop("progress")
    progress.pop("accuracy_before", None)  # in manifests of version 0.1.0; metrics.jsonl has it
    return Manifest(progress=Progress(**progress), **values)


def check_kind(run: RunFolder, kind: str) -> None:
    """Refuse a run that another command made; one without a manifest is of no kind yet.

    Args:
        kind: "train", "sft", "preference" or "reward-model".

    Raises:
        UserError: it is another's.
    """
    made = read_manifest(run).kind if run.manifest.is_file() else None
    if made not in (None, kind):
        raise UserError(
            f"{run.path} is a run of 'penstock {made}', not of 'penstock {kind}'",
            f"it goes on with 'penstock {made} --resume {run.path}'",
        )


def check_resumable(run: RunFolder, kind: str, remedy: str = ANEW) -> None:
    """Refuse a run that another process trains, that another command made, or that was never far enough to be resumed.

    Args:
        remedy: what to do with the latter.

    Raises:
        UserError: says which.
    """
    check_kind(run, kind)
    if run.lock.exists():  # asking leaves no file where no training ever was
        with locked(run):
            pass
    read_manifest(run, remedy)


def completed(run: RunFolder, iterations: int) -> bool:
    """Whether nothing of `run` is left to do: all iterations done, the model exported, its end recorded.

    The manifest counts iterations with a checkpoint; of a run without any, only its end tells.
    """
    if not ended(run):
        return False
    saved = read_manifest(run)
    return saved.checkpoint is None or saved.progress.iteration >= iterations


def ended(run: RunFolder, model: str = "final") -> bool:
    """Whether the model of `run` is written and its summary, which comes last of all, says that it is complete."""
    if not run.model(model).exists() or not run.summary.is_file():
        return False
    return bool(json.loads(run.summary.read_text(encoding="utf-8"))["status"] == "completed")


def seal_checkpoint(aside: Path, final: Path) -> int:
    """Hash and fsync every file under `aside`, side by side, then rename it to `final`; return the bytes it holds.

    The hashes go to `aside/sha256.json`, names relative to the checkpoint.
    """
    paths = files_below(aside)
    names = [str(path.relative_to(aside)) for path in paths]
    hashes = dict(zip(names, for_each_file(paths, sha256), strict=True))
    write_text(aside / "sha256.json", json.dumps(hashes, indent=1))
    size = sum(path.stat().st_size for path in paths)
    settle(aside, final)
    return size


def verify_checkpoint(folder: Path) -> None:
    """Compare every file of a checkpoint with its recorded hash.

    Raises:
        UserError: a file is missing or altered.
    """
    if not (folder / "sha256.json").is_file():
        raise UserError(f"checkpoint {folder} is incomplete (no sha256.json)", "resume from a copy of the run folder")
    expected: dict[str, str] = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
    paths = [folder / name for name in expected]
    found = for_each_file(paths, lambda path: sha256(path) if path.is_file() else None)
    for path, there, recorded in zip(paths, found, expected.values(), strict=True):
        if there != recorded:
            raise UserError(f"checkpoint file {path} is damaged or missing", "resume from a copy of the run folder")


def prune_checkpoints(run: RunFolder, keep: int, named: str | None) -> None:
    """Delete all but the newest `keep` checkpoints up to the manifest's, `named`, and what a crash left half-written.

    A newer one was sealed by an attempt that was killed before the manifest named it: a resume makes it anew. If the
    manifest names none, all go.
    """
    sealed = sorted(run.checkpoints.glob("[0-9]*"))
    kept = [path for path in sealed if named is not None and path.name <= named][-keep:]
    for path in [*sealed, *run.checkpoints.glob(".*.partial")]:
        if path not in kept:
            shutil.rmtree(path)


def reopen(run: RunFolder) -> None:
    """Take back the end of `run`, if it has one: the model is of an earlier attempt, or of fewer iterations."""
    run.summary.unlink(missing_ok=True)  # first, so that nothing without its model calls itself complete
    discard(run.model("final"))
