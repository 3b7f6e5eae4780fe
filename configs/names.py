"""What a misspelt name was probably meant to be: of a key, a value, a column, a function, an experiment."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that is near to `name`, also where that is made of initials; empty if none is.

    >>> nearest_name("promt", ["answer", "prompt"]), nearest_name("lr", ["lora", "learning_rate"])
    ('prompt', 'learning_rate')
    """
    candidates = list(names)
    if close := difflib.get_close_matches(name, candidates, n=1, cutoff=0.7):  # below it 'lr' is close to 'lora'
        return close[0]
    # `lr` for learning_rate: no edit distance finds initials.
    return {"".join(word[:1] for word in candidate.split("_")): candidate for candidate in candidates}.get(name, "")
