"""Parameters in consecutive buckets, and one bucket under way while the last one is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

BUCKET_BYTES = 256 << 20  # large enough to use a link well, small enough to be a small part of a GPU's memory
T = TypeVar("T")


def in_buckets(numels: Mapping[str, int], itemsize: int) -> list[tuple[str, ...]]:
    """Return the names in order, cut where a bucket would exceed its size; a larger parameter has one to itself."""
    buckets: list[list[str]] = []
    filled = limit = BUCKET_BYTES
    for name, numel in numels.items():
        size = numel * itemsize
        if filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return [tuple(bucket) for bucket in buckets]


def numels_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of elements of every shape."""
    return {name: math.prod(shape) for name, shape in shapes.items()}


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield each item once the next one has been made.

    So the work that making an item starts on the device runs while the item before it is used.
    """
    for last in items:
        for item in items:
            yield last
            last = item
        yield last
