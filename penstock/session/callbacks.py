"""Functions of a program that are told of each iteration: of the run that the program trains (penstock/api).

Left out: what other processes are told (`penstock.trackers`), and any influence: a callback that wants the end raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.session.session import Training

Callback = Callable[[int, dict[str, float]], object]  # number of the iteration, its figures

_CALLBACKS: dict[Path, tuple[Callback, ...]] = {}


@contextmanager
def called_back(folder: Path, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Tell `callbacks` of the iterations of the run in `folder`, until the context ends."""
    place = folder.resolve()
    _CALLBACKS[place] = tuple(callbacks)
    try:
        yield
    finally:
        del _CALLBACKS[place]


def call_back(training: Training, iteration: int, metrics: Mapping[str, float]) -> None:
    """Tell of an iteration; 0 is the evaluation before the training. What a callback raises ends the training."""
    for callback in _CALLBACKS.get(training.run.path.resolve(), ()):
        callback(iteration, dict(metrics))
