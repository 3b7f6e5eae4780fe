"""Whether other processes are still there, and programs and functions whose processes leave notes of themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of that id, runs; a zombie does not: nobody has collected it yet, that is all."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; none if it has ended since it was found, or is a zombie."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; none if it has ended since it was found."""
    try:
        return process.environ()
    except psutil.NoSuchProcess:
        return {}


def name_of(process: psutil.Process) -> str:
    """Return the name of a process's program; none if it has ended since it was found."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def leave_children(folder: str | Path) -> None:
    """Start a child in each way there is to get away from this process, note their numbers, and wait for none."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    plain = subprocess.Popen(sleep)
    apart = subprocess.Popen(sleep, start_new_session=True, env={})
    forked = f"import subprocess as s; print(s.Popen({sleep}, start_new_session=True, stdout=s.DEVNULL).pid)"
    orphan = int(subprocess.run([*sleep[:3], forked], stdout=subprocess.PIPE, check=True).stdout)
    for pid in (plain.pid, apart.pid, orphan):
        Path(folder, str(pid)).touch()


def noted(folder: Path) -> list[int]:
    """Return the numbers of the processes that are noted in a folder."""
    return [int(note.name) for note in folder.iterdir()]


@contextmanager
def owner_of_noted(folder: Path, program: str, examples: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a program in a process of its own; yield it and the folder where the processes that it owns are to be noted.

    Args:
        program: gets that folder as its argument; a note is a file whose name is a process's number.
        examples: folder from which it imports, besides the repository.
    """
    script, notes = folder / "owner.py", folder / "notes"
    script.write_text(program)
    notes.mkdir()
    path = os.pathsep.join([str(ROOT), str(examples)])
    owner = subprocess.Popen([sys.executable, script, notes], env={**os.environ, "PYTHONPATH": path})
    try:
        yield owner, notes
    finally:
        owner.kill()
        for note in filter(lambda note: alive(int(note.name)), notes.iterdir()):
            os.kill(int(note.name), signal.SIGKILL)
