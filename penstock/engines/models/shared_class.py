"""A class of the Transformers library of which the trainer and vLLM both have models in one process stays as it is.

What vLLM has no class for it builds from that library's, and changes the class in place, so that calls go through its
own compiler. The trainer's models would be called likewise, past the hooks by which DeepSpeed gathers parameters. So
vLLM's modules get a class of their own that has these changes, and the library's is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def kept_as_it_is(kind: Any) -> Iterator[Callable[[nn.Module], None]]:
    """Within this context vLLM may change a class; what is yielded takes its model, whose modules keep the changes."""
    bases, before, served = kind.__bases__, dict(vars(kind)), list[nn.Module]()
    try:
        yield served.append
    finally:
        changed = {name: value for name, value in vars(kind).items() if name not in before or before[name] is not value}
        added = [base for base in kind.__bases__ if base not in bases]
        for name in changed:
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)
        kind.__bases__ = bases
        if changed:
            theirs: Any = type(kind.__name__, (kind, *added), changed)
            for module in (module for model in served for module in model.modules() if type(module) is kind):
                module.__class__ = theirs
