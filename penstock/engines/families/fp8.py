"""What computing in FP8 is for: for the checks before a start, which need no torch, and for ranks.

Settings are `actor.fp8` (penstock/engines/kernels/fp8_blocks.py) and `rollout.weights`
(penstock/engines/rollout/fp8/weights.py). Left out: what other settings do not go with them
(penstock/configs/schema.py).
"""

from __future__ import annotations

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import ModelShape

ALIGNED = 16  # numbers of FP8 that a product loads at once
IN_16_BITS = "leave it out"


def refuse_one_sided(config: TrainConfig) -> None:
    """Raise where trainer or rollouts compute in FP8 and the others do not.

    Raises:
        UserError: one of both settings is asked for alone.
    """
    if len(config.in_fp8) == 1:
        both = ("actor.fp8=true", "rollout.weights=fp8")
        given, other = both if config.actor.fp8 else reversed(both)
        raise UserError(
            f"{given} goes with {other}: log-probs of trainer and rollouts are farther apart where one of them "
            "computes in FP8 and the other does not",
            f"add {other}, or {IN_16_BITS}",
        )


def refuse_device(config: TrainConfig, device: str) -> None:
    """Raise on a device that is no Hopper GPU, whose name or "CPU" is `device`.

    Raises:
        UserError: a setting asks for FP8.
    """
    if names := config.in_fp8:
        raise UserError(f"{' and '.join(names)} in FP8 is for Hopper GPUs alone, and this is a {device}", IN_16_BITS)


def refuse_model(config: TrainConfig, shape: ModelShape) -> None:
    """Raise for a model that is not computed in FP8, or has not been compared so.

    Raises:
        UserError: a setting asks for it.
    """
    names = config.in_fp8
    if not names:
        return
    odd = [size for _, kind in shape.kinds for matrix in kind.values() for size in matrix if size % ALIGNED]
    found = {
        "has code of its own, whose layers are not known": config.model.code is not None,
        "is a mixture of experts": shape.experts is not None,
        "sees images": bool(shape.encoder),
        "has layers that carry a state": bool(shape.family.mixers),
        "compresses keys and values": shape.latent is not None,
        f"has matrices of {min(odd, default=0)} rows or columns, no multiple of {ALIGNED}": bool(odd),
        "has other layers than attention and gated MLPs": not shape.explained,
    }
    if whys := [why for why, holds in found.items() if holds]:
        raise UserError(f"{' and '.join(names)}: the model {whys[0]}, and that is not computed in FP8", IN_16_BITS)
