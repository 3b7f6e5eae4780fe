"""A run folder made whole before a run goes on: what is damaged is set aside, named, and done without.

    manifest.json      comes from the newest whole checkpoint, which holds its own; without any the run begins anew
    a checkpoint       the one before is taken
    config.yaml        comes from the newest whole checkpoint
    experience         its iteration is done again
    metrics.jsonl      its whole lines stay
    data/, models/     are tokenized, or made, again

What is set aside is renamed to `damaged-...`; nothing damaged is deleted. Where no whole state is left the run is
refused. The caller holds the run's lock. Left out: taking back what came after the checkpoint
(penstock/tasks/iteration/checkpoint.py).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import replacing
from penstock.state.digests import ASIDE, Damaged, check_signed, is_whole, read_sealed, set_aside
from penstock.state.experience import damaged, drop_later_parts, drop_parts, with_parts
from penstock.state.manifest import Manifest, Progress, read_manifest, verify_checkpoint, verify_hashes, write_manifest
from penstock.state.run_folder import RunFolder, damaged_metrics, drop_lost_experience, keep_whole_metrics, read_metrics

NOTHING_LEFT = "put the folder back from a copy, or start anew in another one"
MADE_ONCE = ("initial", "sft")  # models that a resume starts from


def mend(run: RunFolder, kind: str, start: str | None = None) -> list[str]:
    """Bring a run to its newest whole state, or to that of the checkpoint `start`; return what to say of it.

    Args:
        kind: the command that continues it, in case nothing else is known of the run.
        start: name of a checkpoint, with or without its leading zeros.

    Raises:
        UserError: no whole state is left, or `start` is none of its checkpoints, or is damaged.
    """
    said = _mend_manifest(run.finetuning, Manifest(Progress()), None)
    said += _mend_manifest(run, _beginning(run, kind), start)
    said += _mend_config(run)
    said += [*_mend_metrics(run), *_mend_metrics(run.warm_up)]
    said += [*_mend_rows(run), *_mend_models(run), *_mend_experience(run, read_manifest(run).progress.iteration)]
    return said


def checkpoints(run: RunFolder) -> list[str]:
    """Return the names of a run's checkpoints, the newest first."""
    return sorted((path.name for path in run.checkpoints.glob("[0-9]*") if path.is_dir()), reverse=True)


def checkpoint_named(run: RunFolder, start: str) -> str:
    """Return the name of a checkpoint that is given with or without its leading zeros.

    Raises:
        UserError: the run has none of this name.
    """
    names = checkpoints(run)
    if (name := start.strip().zfill(6)) in names:
        return name
    there = f"there are {', '.join(reversed(names))}" if names else "there are none"
    raise UserError(f"{run.path} has no checkpoint {start}", there)


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the folder of the checkpoint that a manifest names, else of the newest one of supervised steps."""
    for folder in (run, run.finetuning):
        if folder.manifest.is_file() and (name := read_manifest(folder).checkpoint):
            return folder.checkpoints / name
    return None


def _beginning(run: RunFolder, kind: str) -> Manifest:
    """Return the manifest of a run without checkpoints, with kind and links of the one that counts supervised steps."""
    if not run.finetuning.manifest.is_file():
        return Manifest(Progress(), kind=kind)
    return replace(read_manifest(run.finetuning), progress=Progress(), checkpoint=None)


def _mend_manifest(run: RunFolder, beginning: Manifest, start: str | None) -> list[str]:
    """Let the manifest name the newest whole checkpoint, or `start`."""
    saved, names, problem = None, checkpoints(run), ""
    try:
        saved = read_manifest(run) if run.manifest.is_file() else None
    except Damaged as error:
        problem = error.problem
    if saved is None and not problem and not names:
        return []
    wanted = checkpoint_named(run, start) if start else saved.checkpoint if saved else None
    candidates = [wanted] if start else [name for name in names if saved is None or name <= (wanted or "")]
    whole, wrong = _newest_whole(run, [name for name in candidates if name])
    if whole is None and (wanted or wrong):
        raise _refused(run, wanted, wrong, start)
    said = [f"{error.problem}; set aside as {set_aside(run.checkpoints / name)}" for name, error in wrong.items()]
    if problem:
        said.append(f"{problem}; set aside as {set_aside(run.manifest)}")
    elif wanted and wanted not in names:
        said.append(f"checkpoint {run.checkpoints / wanted} is gone")
    now = saved or beginning
    if whole is not None:
        now = replace(saved or whole, progress=whole.progress, checkpoint=whole.checkpoint)
    if now != saved:
        write_manifest(run, now)
        said.append(f"{run.path} goes on from {f'checkpoint {now.checkpoint}' if now.checkpoint else 'its beginning'}")
    return said


def _newest_whole(run: RunFolder, names: list[str]) -> tuple[Manifest | None, dict[str, Damaged]]:
    """Return the manifest in the first whole one of these checkpoints, and what is wrong with those before it."""
    wrong: dict[str, Damaged] = {}
    for name in names:
        try:
            return verify_checkpoint(run.checkpoints / name), wrong
        except Damaged as error:
            wrong[name] = error
    return None, wrong


def _refused(run: RunFolder, wanted: str | None, wrong: dict[str, Damaged], start: str | None) -> UserError:
    problem = next(iter(wrong.values())).problem if wrong else f"checkpoint {run.checkpoints / str(wanted)} is gone"
    others = [name for name in reversed(checkpoints(run)) if name not in wrong]
    if start and others:
        return UserError(problem, f"go on from another: --resume {run.path} --from {' or '.join(others)}")
    return UserError(f"{problem}, and no whole checkpoint is left", NOTHING_LEFT)


def _mend_config(run: RunFolder) -> list[str]:
    try:
        check_signed(run.config)
    except Damaged as error:
        checkpoint = newest_checkpoint(run)
        if checkpoint is None:
            raise UserError(
                error.problem, f"{NOTHING_LEFT}; what may change in a run is given to --resume, as key=value"
            ) from None
        with replacing(run.config) as new:
            shutil.copyfile(checkpoint / run.config.name, new)
            aside = set_aside(run.config)
        return [f"{error.problem}; set aside as {aside}, that of checkpoint {checkpoint.name} is in force"]
    return []


def _mend_metrics(run: RunFolder) -> list[str]:
    """Keep the whole lines; say which iterations the record lacks."""
    if not (wrong := damaged_metrics(run)):
        return []
    lines = ", ".join(map(str, wrong))
    said = f"{run.metrics} is damaged in line {lines}; set aside as {keep_whole_metrics(run)}"
    numbers = [record["iteration"] for record in read_metrics(run)]
    lost = sorted(set(range(1, max(numbers, default=0))) - set(numbers))
    return [said + (f"; the figures of {', '.join(map(str, lost))} are lost" if lost else "")]


def _mend_rows(run: RunFolder) -> list[str]:
    """Set damaged rows aside; they are made again if it is known from what they were made."""
    folder = run.prompts("train").parent
    rows = [path for path in _in(folder, "*.parquet") if not is_whole(path)]
    notes = {path: problem for path in _in(folder, "*.json") if (problem := _unreadable(path))}
    if rows and notes:
        raise UserError(f"{rows[0]} is damaged, and so is {next(iter(notes))}, from which it is made", NOTHING_LEFT)
    said = [f"{path} is damaged; set aside as {set_aside(path)}, and made again" for path in rows]
    return said + [f"{problem}; set aside as {set_aside(path)}" for path, problem in notes.items()]


def _unreadable(path: Path) -> str:
    try:
        read_sealed(path)
    except Damaged as error:
        return error.problem
    return ""


def _mend_models(run: RunFolder) -> list[str]:
    said = []
    for folder in (run.model(name) for name in MADE_ONCE if run.model(name).exists()):
        try:
            verify_hashes(folder)
        except Damaged as error:
            said.append(f"{error.problem}; set aside as {set_aside(folder)}, and made again")
    return said


def _mend_experience(run: RunFolder, done: int) -> list[str]:
    """Drop experience that is not taken over, and set aside the damaged files among the rest."""
    drop_lost_experience(run, done)
    said, following = [], run.experience(done + 1)
    for path in (run.carried(done), run.carried(done + 1)):
        if path.exists() and not is_whole(path):
            said.append(f"{path} is damaged; set aside as {set_aside(path)}, what it holds is generated anew")
    for path in sorted({*with_parts(following.parent), *([following] if following.exists() else [])}):
        if not path.exists():
            drop_parts(path)
            continue
        if wrong := damaged(path):
            said.append(f"{wrong} is damaged; set aside as {set_aside(wrong)}")
        if wrong == path:
            drop_parts(path)
        else:
            drop_later_parts(path)
    return said


def _in(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith((".", ASIDE)))
