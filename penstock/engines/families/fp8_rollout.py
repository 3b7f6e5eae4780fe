"""What stands in the way of rollouts in FP8: for the checks before a start, which need no torch, and for ranks.

Their products are those of penstock/engines/kernels/fp8_scales.py, their keys and values those of vLLM's attention on
Hopper GPUs. Left out: what other settings do not go with them (penstock/configs/schema.py).
"""

from __future__ import annotations

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.families.shape import ModelShape

SEEN_ON_GPUS: tuple[str, ...] = ()  # settings, "kv_cache_dtype" or "weights", with which trainer and vLLM were compared
MULTIPLE = 16  # of which the sizes of a matrix have to be one: what the kernels load at a time
IN_16_BITS = "leave it out: rollouts then compute as the trainer does"


def refuse_unseen(rollout: RolloutConfig) -> None:
    """Raise where nobody has shown yet that rollouts in FP8 are near the policy.

    Raises:
        UserError: they are asked for.
    """
    if unseen := [name for name in rollout.in_fp8 if name not in SEEN_ON_GPUS]:
        raise UserError(
            f"{_named(unseen)}: nobody has compared trainer and vLLM yet where rollouts compute so", IN_16_BITS
        )


def refuse_without_kernels(rollout: RolloutConfig, device: str) -> None:
    """Raise on a device that is no Hopper GPU, whose name or "CPU" is `device`.

    Raises:
        UserError: rollouts in FP8 are asked for.
    """
    if rollout.in_fp8:
        raise UserError(
            f"{_named(rollout.in_fp8)} is for Hopper GPUs alone, and rollouts are on a {device}", IN_16_BITS
        )


def refuse_model(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise for a model of which it is not shown yet that it computes in FP8 as the trainer's does.

    Raises:
        UserError: rollouts of such a one are asked for in FP8.
    """
    if not rollout.in_fp8:
        return
    sizes = {size for _, kind in shape.kinds for matrix in kind.values() for size in matrix}
    odd = sorted(size for size in sizes if size % MULTIPLE)
    found = {
        "is a mixture of experts": rollout.weights == "fp8" and shape.experts is not None,
        f"has matrices of {odd[0] if odd else 0} rows or columns, no multiple of {MULTIPLE}": rollout.weights == "fp8"
        and bool(odd),
        "sees images": bool(shape.encoder),
        "has layers that carry a state": bool(shape.family.mixers),
        "compresses keys and values": shape.latent is not None,
    }
    if whys := [why for why, holds in found.items() if holds]:
        raise UserError(f"{_named(rollout.in_fp8)}: the model {whys[0]}, and that is not computed in FP8", IN_16_BITS)


def _named(settings: list[str]) -> str:
    return " and ".join(f"rollout.{name}=fp8" for name in settings)
