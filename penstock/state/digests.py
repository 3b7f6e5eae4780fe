"""Digests of what a resume reads: a file that is not, bit for bit, what was written is noticed, named, and not used.

One hash, SHA-256, in three places: small JSON files and lines carry it in themselves (`sealed`), a text file in its
last line (`signed`), and a file that other programs read too has an empty hidden file beside it, named after the hash
(`mark`). Such a name costs no second content that could be damaged, and a file may have two of them, so that it is
whole before and after it is replaced.

They notice what disks, cables and people do by accident. Left out: who wrote a file; whoever can write into the folder
can write digests as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.base.files import fsync, replacing, sha256, write_text

DIGEST = "sha256"
LAST_LINE = "# sha256 of the lines above: "
ASIDE = "damaged"


class Damaged(UserError):
    """A file or folder of a run is not what was written; a resume sets it aside and does without."""


def sealed(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON text with the digest of `values` in it."""
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return json.dumps({**values, DIGEST: digest}, indent=indent)


def unsealed(text: str, indent: int | None = None) -> dict[str, Any]:
    """Return the values of what `sealed` wrote.

    Raises:
        ValueError: it is not that text, to the last character.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop(DIGEST, None) is None or sealed(values, indent) != text:
        raise ValueError("its content does not fit its digest")
    return values


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file with its digest, atomically and durably."""
    write_text(path, sealed(values, indent=2) + "\n")


def read_sealed(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the values of a file that `write_sealed` wrote.

    Raises:
        Damaged: it is another text.
    """
    try:
        text = path.read_bytes().decode()
        if not text.endswith("\n"):
            raise ValueError("its end is missing")
        return unsealed(text[:-1], indent=2)
    except (ValueError, OSError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {_first_line(error)}", remedy) from None


def signed(text: str) -> str:
    """Return `text`, whose lines may have comments, with its digest in a last one."""
    return f"{text}{LAST_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def check_signed(path: Path, remedy: str = "") -> None:
    """Refuse a file that is not what `signed` returned.

    Raises:
        Damaged: it is damaged, or somebody has edited it.
    """
    try:
        whole = path.read_bytes().decode()
        if signed(whole[: whole.rindex(LAST_LINE)]) != whole:
            raise ValueError("its content does not fit its digest")
    except (ValueError, OSError) as error:
        what = "it has no digest" if "substring" in str(error) else _first_line(error)
        raise Damaged(f"{path} is damaged, or was edited: {what}", remedy) from None


@contextmanager
def marked(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one step, durably, and is known by its digest."""
    with replacing(path) as aside:
        yield aside
        mark = _mark(path, sha256(aside))
        mark.touch()
    for other in _marks(path):
        if other != mark:
            other.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Whether a file is one that `marked` wrote."""
    try:
        return _mark(path, sha256(path)).exists()
    except OSError:  # the disk cannot read it
        return False


def remove(path: Path) -> None:
    """Delete a file and its marks."""
    for one in (path, *_marks(path)):
        one.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder, so that nothing takes it for whole and a person can look at it."""
    places = (path.with_name(f"{ASIDE}-{suffix}{path.name}") for suffix in ("", *(f"{n}-" for n in range(2, 1000))))
    place = next(place for place in places if not place.exists())
    path.rename(place)
    fsync(place.parent)
    return place


def _mark(path: Path, digest: str) -> Path:
    return path.with_name(f".{path.name}.{digest}.whole")


def _marks(path: Path) -> list[Path]:
    return list(path.parent.glob(f".{path.name}.*.whole"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
