"""`--resume` without a path: the newest run of a recipe's name, after asking.

So the command that began a run continues it with one word more. Only a terminal is asked: what goes on by itself
names its run. Left out: runs in a folder of their own (`--run`), whose name is no recipe's.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import typer

from penstock.base.errors import UserError
from penstock.cli.resume_option import NEWEST
from penstock.cli.starting import Asked
from penstock.cli.terminal import short_path
from penstock.configs.loading.load import load_tree
from penstock.session.opening import Kind, Tree
from penstock.state.digests import Damaged
from penstock.state.manifest import read_kind, read_progress
from penstock.state.run_folder import RunFolder

STAMP = re.compile(r"(?P<name>.+)-(?P<when>\d{8}-\d{6})(?:-(?P<count>\d+))?")  # as new_run_folder names them


def with_newest_run(kind: Kind[Tree], asked: Asked) -> Asked:
    """Return what a command was given, with the run that a `--resume` without a path means; asks whether it is meant.

    What its recipe and overrides say is looked at for name and folder; overrides are changes, where they change it.

    Raises:
        UserError: there is no such run, or nobody to ask.
        typer.Exit: it is not meant.
    """
    if asked.resume != NEWEST:
        return asked
    overrides, recipe = [*(asked.overrides or ())], asked.recipe
    if recipe is not None and "=" in str(recipe) and not recipe.is_file():
        overrides, recipe = [str(recipe), *overrides], None
    config = kind.tree() if recipe is None else load_tree(recipe, overrides, kind.tree)
    name = None if recipe is None else config.name + kind.suffix
    found = newest_run(Path(config.folder), kind.name, name)
    if found is None:
        whose = "" if name is None else f" of the name {name}"
        raise UserError(
            f"{short_path(Path(config.folder))} holds no run of 'penstock {kind.name}'{whose} that could go on",
            "name its folder: --resume RUN",
        )
    place = short_path(found.path)
    if not sys.stdin.isatty():
        raise UserError("--resume names no run, and there is no terminal to ask in", f"name it: --resume {place}")
    if not typer.confirm(f"continue {place}{_how_far(kind, found)}?", default=True):
        raise typer.Exit(1)
    return replace(asked, recipe=None, overrides=overrides, resume=found.path)


def newest_run(folder: Path, command: str, name: str | None) -> RunFolder | None:
    """Return the newest run of a command in a folder of runs that has begun; None: there is none.

    Args:
        name: what runs of a recipe are called, without their time; None: any.
    """
    found = dict[tuple[str, int], RunFolder]()
    for path in folder.glob("*"):
        match, run = STAMP.fullmatch(path.name), RunFolder(path)
        if match is None or name not in (None, match["name"]) or not run.config.is_file():
            continue
        if read_kind(run) == command:
            found[match["when"], int(match["count"] or 1)] = run
    return found[max(found)] if found else None


def _how_far(kind: Kind[Tree], run: RunFolder) -> str:
    try:
        done = read_progress(kind.counted(run)).progress.iteration
    except Damaged:
        return ""
    return f" after {'step' if kind.in_steps else 'iteration'} {done}"
