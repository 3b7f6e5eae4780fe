"""Imports of large libraries, in no more time than they need.

Python's garbage collector looks through all that an import makes, again and again, and finds nothing: a fifth of the
time. And some libraries import others for functions that nothing here calls.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def importing(without: Sequence[str] = ()) -> Iterator[None]:
    """Keep the collector still; imports find no libraries of the names `without`. Who wants one afterwards gets it."""
    hidden = [name for name in without if name not in sys.modules]
    collects = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's way to say that there is none
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()
