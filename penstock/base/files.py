"""Atomic files: a reader sees the old content or the new one, never a half of either, also after a power cut."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from penstock.base.errors import UserError

Result = TypeVar("Result")


def fsync(path: Path) -> None:
    """Make a file or a directory entry durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one step, on an exception it disappears.

    Args:
        durable: wait for the disk. Without, after a power cut the file may be there and hold nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        if durable:
            fsync(aside)
        aside.replace(path)
        if durable:
            fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def no_folder(path: Path) -> str:
    """Say why `path` is no folder: it is a file, or not there."""
    return f"{path} is a file" if path.is_file() else f"there is no folder {path}"


def nearest_existing(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that exists."""
    there = folder.absolute()
    while not os.path.exists(there):  # noqa: PTH110 - Path.exists raises where a folder may not be looked into
        there = there.parent
    return there


def check_possible(folder: Path, what: str, remedy: str) -> None:
    """Refuse a folder in which this process can make nothing, there or not, before hours are spent on what goes there.

    What exists is not asked for its permissions, which say little of /proc or of a network's file system: for a moment
    there is an empty folder in the nearest one that exists.

    Raises:
        UserError: `what` cannot be made; carries `remedy`.
    """
    there = nearest_existing(folder)
    try:
        tempfile.TemporaryDirectory(prefix=".", dir=there).cleanup()
    except OSError as error:
        raise UserError(f"{what} cannot be made: {error.strerror} ({there})", remedy) from error


def empty_beside(final: Path) -> Path:
    """Return an empty folder to fill before it is renamed to `final`; what a crash left of an earlier one goes."""
    aside = final.with_name(f".{final.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


@contextmanager
def discarded(aside: Path) -> Iterator[None]:
    """Remove a folder that was not renamed when the block ends: what failed for want of room leaves some."""
    try:
        yield
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def filling(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `final` in one step and durably, else it disappears.

    Args:
        final: is not there yet, or an empty folder.
    """
    aside = empty_beside(final)
    try:
        yield aside
        settle(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def settle(aside: Path, final: Path) -> None:
    """Rename a folder to `final` once all below it is on the disk: the name says that the content is whole."""
    for_each_file(files_below(aside), fsync)
    for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        fsync(folder)  # the entries of its files
    aside.rename(final)
    fsync(final.parent)


def discard(folder: Path) -> None:
    """Remove a folder, if it is there, so that no crash leaves a part of it under its name."""
    if not folder.exists():
        return
    aside = empty_beside(folder)
    folder.rename(aside)
    fsync(folder.parent)
    shutil.rmtree(aside)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """Append `text` durably; where the disk does not take all of it, nothing of it stays."""
    with path.open("ab", buffering=0) as stream:
        before, left = stream.tell(), memoryview(text.encode("utf-8"))
        try:
            while left:
                left = left[stream.write(left) :]
            os.fsync(stream.fileno())
        except OSError:
            os.ftruncate(stream.fileno(), before)
            raise


def share_weights_of(folder: Path, like: str = "config.json") -> None:
    """Give the weight files of a folder the mode of the file `like`: safetensors lets their owner alone read them."""
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / like, path)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Return every file under `folder`, in name order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def for_each_file(paths: Sequence[Path], action: Callable[[Path], Result]) -> list[Result]:
    """Return what `action` says of each path, in their order; the calls run side by side, one thread per file.

    Worth it where `action` hashes or waits for the disk: both let other threads run.
    """
    with ThreadPoolExecutor() as pool:
        return list(pool.map(action, paths))
