"""What the ranks of `penstock bench native` are told, by a file; free of the libraries that they train with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LIBRARIES = {"fsdp": "PyTorch FSDP", "deepspeed": "DeepSpeed"}


@dataclass(frozen=True)
class Work:
    """What a rank is to do, as JSON.

    Attributes:
        library: `fsdp` or `deepspeed`.
        model: a Hugging Face folder.
        experience: the rows, an experience file with advantages.
        results: folder that gets `RANK.json`, and the file in which the ranks meet.
        rows: of a micro-batch.
        steps: optimizer steps, each on all rows.
        optimizer: its settings; the learning rate holds for every step.
        zero_stage: of DeepSpeed; FSDP shards parameters, gradients and optimizer.
        recompute: whether activations are computed again in the backward pass.
    """

    library: str
    model: str
    experience: str
    results: str
    rows: int
    steps: int
    optimizer: dict[str, Any]
    zero_stage: int
    recompute: bool
