"""What was made lately, kept for the next time up to a number of bytes: what has not been asked for longest goes first.

functools' cache counts entries, and one image may be as large as a thousand others. Left out: threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


class Recent(Generic[Key, Made]):
    """Values by their keys, made when they are not there.

    Args:
        make: makes the value of a key; what it raises is raised, and nothing kept.
        bytes_of: how many a value has.
        most: bytes that are kept; the newest value stays, however large.
    """

    def __init__(self, make: Callable[[Key], Made], bytes_of: Callable[[Made], int], most: int) -> None:
        self._make, self._bytes_of, self._most = make, bytes_of, most
        self._kept: OrderedDict[Key, Made] = OrderedDict()
        self._bytes = 0

    def __call__(self, key: Key) -> Made:
        """Return the value of a key."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = self._make(key)
        self._bytes += self._bytes_of(made)
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= self._bytes_of(self._kept.popitem(last=False)[1])
        return made
