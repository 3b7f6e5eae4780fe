"""What `actor.fp8` is for, for the checks before a start, which need no torch, and for ranks."""

from __future__ import annotations

from penstock.engines.families.shape import ModelShape

ALIGNED = 16  # numbers of FP8 that a product loads at once
SHOWN_ON_GPUS = False  # whether loss, gradients and speed were compared with bfloat16's on a GPU
NOT_SHOWN = (
    "actor.fp8: on GPUs nobody has compared what is trained so with bfloat16 yet",
    "leave it out; 'penstock bench update' measures it",
)
NEEDS_HOPPER = ("actor.fp8 is for Hopper GPUs: others compute no such products, or no faster", "leave it out")


def without_fp8(shape: ModelShape) -> str | None:
    """Return why a model is not trained in FP8, as a message says it; None if it is."""
    if shape.experts is not None:
        return "most products of a mixture are its experts', which stay bfloat16"
    if shape.delta is not None or not shape.explained:
        return "it has other layers than attention and gated MLPs, which have not been compared in FP8"
    odd = [name for name, sizes in shape.matrices.items() if any(size % ALIGNED for size in sizes)]
    return f"the sizes of {odd[0]} are no multiples of {ALIGNED}" if odd else None
