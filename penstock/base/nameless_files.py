"""Memory that lives in a file without a name: the kernel keeps in memory what there is room for, and the disk has all.

Such a file is gone with the last process that maps it, however that ends, so none is ever left to be removed. What is
written there reaches the disk when the kernel says so, and is not meant to survive a process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import psutil

from penstock.base.errors import UserError

IN_MEMORY = ("tmpfs", "ramfs")  # types of file systems
NAME_ANOTHER = "name a folder on a local disk that can be written to, on each machine that trains"


def file_system_of(folder: Path) -> str:
    """Return the type of file system that a folder is on, e.g. "ext4"; empty where that is not known."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    nearest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return nearest.fstype if nearest else ""


def check_on_disk(folder: Path) -> None:
    """Check that files of a folder are not in memory themselves, where nothing would be saved.

    Raises:
        UserError: they are.
    """
    if (system := file_system_of(folder.resolve())) in IN_MEMORY:
        raise UserError(
            f"offload_folder {folder} is in memory itself ({system}), so nothing would be saved",
            NAME_ANOTHER,
        )


def map_nameless(folder: Path, size: int) -> mmap.mmap:
    """Return so many bytes, zeros at first, that live in a file in a folder; its room is taken at once.

    Without that a disk that fills up later would end the process at a write (SIGBUS).

    Args:
        size: above zero.

    Raises:
        UserError: the folder is not there, nothing can be made in it, or its disk has too little room.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"{size:,} bytes of files cannot be kept in {folder}: {error.strerror}",
            "make room there, or name a folder on a local disk of this machine that can be written to",
        ) from error
