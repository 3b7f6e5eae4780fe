"""What a misspelt name was probably meant to be: of a key, a value, a column, a function, an experiment."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that is near to `name`; empty if none is.

    >>> nearest_name("promt", ["answer", "prompt"])
    'prompt'
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)  # below it 'lr' is close to 'lora'
    return close[0] if close else ""
