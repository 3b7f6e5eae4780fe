"""A rank whose memory holds no micro-batch beyond a size, as a GPU's would not: from its second update on."""

from __future__ import annotations

from typing import Any

import torch

from penstock.engines.ranks.worker import Worker
from penstock.engines.training import updates

LARGEST = 32  # tokens
_run, _step = updates._run, updates._step


class ShortWorker(Worker):
    """A `Worker` that runs out of memory between an iteration's optimizer steps, once an update has gone well."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(rank, world_size, gpu)
        self.updates = self.steps = 0
        setattr(updates, "_run", self._counted)  # noqa: B010 - a type checker knows it as a function
        setattr(updates, "_step", self._short)  # noqa: B010

    def _counted(self, *arguments: Any, **options: Any) -> dict[str, float]:
        self.updates, self.steps = self.updates + 1, 0
        return _run(*arguments, **options)

    def _short(self, trainer: Any, rows: Any, index_B: Any, budget: int, *rest: Any) -> dict[str, float] | None:
        self.steps += 1
        if self.updates > 1 and self.steps > 1 and budget > LARGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return _step(trainer, rows, index_B, budget, *rest)
