"""Lanes: how many trainings of a sweep run at a time, and the GPUs of each.

On GPUs a lane is a set of those that are visible here: as many as the recipe's `groups` ask for, and where they do not
say, a share of all. On a CPU there is one lane unless more are asked for, which then share the cores.

Left out: other trainings that have GPUs of a lane, for which a training waits by itself
(penstock/session/machines/claims.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import gpu_uuid, visible_gpus

GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Lane:
    """A place for one training at a time.

    Attributes:
        environment: variables of its processes, over those of this one.
    """

    number: int
    environment: tuple[tuple[str, str], ...] = ()


def lanes_for(configs: Sequence[TrainConfig], at_once: int | None) -> list[Lane]:
    """Return the lanes for trainings of these configurations.

    Args:
        at_once: how many are asked for; None: as many as GPUs allow, one on a CPU.

    Raises:
        UserError: there are not GPUs for so many.
    """
    visible = visible_gpus()
    if not visible:
        return _on_cores(min(at_once or 1, len(configs)))
    size = max(gpus_asked(config) for config in configs)
    free = any(takes_all(config) for config in configs)
    most = len(visible) // max(size, 1)
    wanted = min(at_once or (1 if free else most), len(configs))
    if wanted > most or (free and wanted > len(visible)):
        needs = f"a training takes {size} GPUs" if size else "a training takes a GPU at least"
        raise UserError(f"--at-once {wanted}: {needs}, and {len(visible)} are visible", f"at most {most} fit at once")
    share = len(visible) // wanted if free else size
    return [_on_gpus(number, visible[number * share : (number + 1) * share]) for number in range(wanted)]


def gpus_asked(config: TrainConfig) -> int:
    """Return how many GPUs of this machine a training has to see for what its groups ask for; 0: they do not say."""
    here = [group for group in config.groups.values() if group.hosts is None]
    named = {gpu for group in here for gpu in group.gpus or ()}
    return max(max(named, default=-1) + 1, len(named) + sum(group.ranks or 0 for group in here))


def takes_all(config: TrainConfig) -> bool:
    """Whether a training takes all GPUs that it sees."""
    groups = config.groups.values()
    return not groups or any(group.hosts is None and group.gpus is None and group.ranks is None for group in groups)


@contextmanager
def seen(lane: Lane) -> Iterator[None]:
    """Let this process see the GPUs of a lane, for checks that look at what a training will see."""
    before = os.environ.get(GPUS)
    os.environ.update({name: value for name, value in lane.environment if name == GPUS})
    try:
        yield
    finally:
        os.environ.pop(GPUS, None)
        if before is not None:
            os.environ[GPUS] = before


def _on_gpus(number: int, gpus: Sequence[int]) -> Lane:
    return Lane(number, ((GPUS, ",".join(map(gpu_uuid, gpus))),))


def _on_cores(count: int) -> list[Lane]:
    if count == 1:
        return [Lane(0)]
    cores = str(max(1, len(os.sched_getaffinity(0)) // count))
    return [Lane(number, (("OMP_NUM_THREADS", cores), ("RAYON_NUM_THREADS", cores))) for number in range(count)]
