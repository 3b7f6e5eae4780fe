"""Nameless files of a folder that this process maps: where they are in memory, and out of it with them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MS_SYNC, MADV_PAGEOUT = 4, 21  # of Linux


def mapped_files(folder: str) -> list[tuple[int, int]]:
    """Return where nameless files of a folder begin and end in memory."""
    words = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    named = [(one[0], one[5]) for one in words if len(one) == 6]
    inside = [place for place, path in named if path.startswith(f"{folder}/") and path.endswith(" (deleted)")]
    return [(int(first, 16), int(last, 16)) for first, last in (place.split("-") for place in inside)]


def drive_out(begin: int, end: int) -> None:
    """Write a mapping to the disk and let its pages leave memory, where nothing else keeps them there."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    for failed in (libc.msync(*place, MS_SYNC), libc.madvise(*place, MADV_PAGEOUT)):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
