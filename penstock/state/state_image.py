"""The image of a rank's trained state: a safetensors file, or the same bytes in memory that its host owns.

    8 bytes    length of the header; zero while the rest is being written, so that an image is whole or is none
    header     JSON: where each tensor lies, and as metadata what a training has to know of it
    tensors    one after the other, from a page's beginning

Any program that reads safetensors reads one. Left out: which tensors there are
(penstock/engines/training/state_images.py), and whether the bytes are those that were written
(penstock/state/digests.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError

LENGTH = 8  # bytes that hold the header's length
PAGE = 4096
FORMAT = "penstock-state-1"
IMAGES = "state-*.safetensors"  # in a checkpoint
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}  # bytes of an element
MOST_HEADER = 1 << 28  # bytes; names and slices of the largest models take some MiB


def image_name(group: str, rank: int) -> str:
    """Return what the file of a rank is called in a checkpoint."""
    return f"state-{group}-{rank}.safetensors"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in an image: bytes from its beginning."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What an image says of itself: where tensors lie, and the training's own values."""

    places: dict[str, Place]
    values: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """An image that is to be written.

    Attributes:
        header: with its length in front.
        places: where the tensors go.
        size: of the whole image, in bytes.
    """

    header: bytes
    places: dict[str, Place]
    size: int


def plan_image(tensors: Iterable[tuple[str, str, tuple[int, ...]]], values: dict[str, Any]) -> Plan:
    """Lay out an image of tensors (name, dtype, shape), one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "state": json.dumps(values)}}
    relative, at = {}, 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * WIDTHS[dtype]
        relative[name] = Place(dtype, shape, at, end)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text = text.ljust(-(-(LENGTH + len(text)) // PAGE) * PAGE - LENGTH)
    begin = LENGTH + len(text)
    places = {
        name: Place(place.dtype, place.shape, begin + place.begin, begin + place.end)
        for name, place in relative.items()
    }
    return Plan(len(text).to_bytes(LENGTH, "little") + text, places, begin + at)


def read_header(path: Path) -> Header | None:
    """Return the header of an image, None where none was finished.

    Raises:
        UserError: it is no image of ours.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH), "little")
        if length == 0:
            return None
        try:
            if length > MOST_HEADER:
                raise ValueError("its header is too long")
            return _header(stream.read(length), LENGTH + length, path.stat().st_size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} holds no trained state that this version reads: {error}",
                "go on from a checkpoint of this version, or with the version that wrote it",
            ) from None


def _header(text: bytes, begin: int, size: int) -> Header:
    entries = json.loads(text)
    metadata = entries.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is {metadata['format']}, not {FORMAT}")
    places = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        place = Place(entry["dtype"], tuple(entry["shape"]), begin + first, begin + last)
        if (
            not begin <= place.begin <= place.end <= size
            or last - first != math.prod(place.shape) * WIDTHS[place.dtype]
        ):
            raise ValueError(f"{name} lies outside of it")
        places[name] = place
    return Header(places, json.loads(metadata["state"]))
