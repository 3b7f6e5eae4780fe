"""The rank of `penstock bench checkpoint`: the real one, which also saves its state by the ways of other libraries.

Left out: what is measured of it (penstock/benchmarks/checkpoint.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed
from torch.distributed import checkpoint

from penstock.engines.commands.message import Command, decode, encode, name_of
from penstock.engines.groups.channel import Tell
from penstock.engines.ranks.worker import Worker

if TYPE_CHECKING:
    from penstock.engines.groups.rank import Pending

Library = Literal["torch", "deepspeed"]


@dataclass(frozen=True)
class Saved:
    """How long a rank was held up, and after which time the files were written, in seconds."""

    held_s: float
    written_s: float


@dataclass(frozen=True)
class SaveBy(Command[Saved]):
    """Save the actor's state with `torch.distributed.checkpoint.async_save`, or with DeepSpeed's `save_checkpoint`."""

    library: Library
    folder: str


class SavingWorker(Worker):
    """A `Worker` that also knows `SaveBy`."""

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | Pending:
        """Carry out a command, or begin it."""
        if command != name_of(SaveBy):
            return super().handle(command, arguments, tell)
        asked = decode(SaveBy, arguments, command)
        torch.distributed.barrier()
        save = self._by_torch if asked.library == "torch" else self._by_deepspeed
        return {"reply": encode(save(Path(asked.folder))), "usage": {}}

    def _by_torch(self, folder: Path) -> Saved:
        state = self.models.trainers["actor"].trained_state().tensors
        state = {f"{self.models.rank}/{name}": tensor for name, tensor in state.items()}
        began = time.perf_counter()
        begun: Any = checkpoint.async_save(state, checkpoint_id=folder)
        held_s = time.perf_counter() - began
        begun.result()
        return Saved(held_s, time.perf_counter() - began)

    def _by_deepspeed(self, folder: Path) -> Saved:
        began = time.perf_counter()
        self.models.trainers["actor"].engine.save_checkpoint(str(folder), tag="state", save_latest=False)
        seconds = time.perf_counter() - began
        return Saved(seconds, seconds)
