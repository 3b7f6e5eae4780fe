"""Checks that ranks can share a model out: its matrices, its attention's heads, its experts."""

from __future__ import annotations

from penstock.base.errors import UserError
from penstock.checks.model.shape import shape_of
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import ModelShape


def check_tensor_parallel(ranks: int, shape: ModelShape) -> None:
    """Check that vLLM can cut the model over the ranks of one rollout engine.

    Raises:
        UserError: heads or MLP cannot be divided.
    """
    uneven = [name for name in ("heads", "intermediate_size") if getattr(shape, name) % ranks]
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        uneven.append("kv_heads")
    if uneven:
        sizes = ", ".join(f"{getattr(shape, name)} {name}" for name in uneven)
        raise UserError(
            f"rollout.tensor_parallel={ranks}: the model's {sizes} cannot be spread evenly",
            "use a number that divides heads and intermediate_size, and divides kv_heads or is a multiple of them",
        )


def check_heads(section: str, ranks: int, shape: ModelShape) -> None:
    """Check that ranks that compute a micro-batch together can share a model's attention out.

    Args:
        section: the key of the trained model's section.
        ranks: its `sequence_parallel`.

    Raises:
        UserError: heads cannot be divided, or it is a mixture of experts.
    """
    if ranks == 1:
        return
    key = f"{section}.sequence_parallel"
    if shape.experts is not None:
        raise UserError(
            f"{key}={ranks} is not for mixtures of experts: how evenly all tokens of a micro-batch use them is not "
            "summed over ranks",
            f"remove {key}, and use shorter rows or {section}.gradient_checkpointing=true",
        )
    divided = shape.heads % ranks == 0, shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
    names = [name for name, even in zip(("heads", "kv_heads"), divided, strict=True) if not even]
    if names:
        sizes = ", ".join(f"{getattr(shape, name)} {name}" for name in names)
        raise UserError(
            f"{key}={ranks}: the model's {sizes} cannot be spread evenly, and each rank computes attention of a part "
            "of them",
            "use a number that divides heads, and divides kv_heads or is a multiple of them",
        )


def check_expert_parallel(config: TrainConfig, ranks: int) -> None:
    """Check that the ranks of the actor's group can share out the experts of its layers.

    Raises:
        UserError: it has none, or neither they nor the ranks make even shares.
    """
    if (count := config.actor.expert_parallel) == 1:
        return
    key, experts = f"actor.expert_parallel={count}", shape_of(config).experts
    if experts is None:
        raise UserError(f"{key} has no effect: the model has no experts", "remove it, or train a mixture of experts")
    if config.model.code is not None:
        raise UserError(f"{key} is not for a model with code of its own, whose experts are not known", "remove it")
    if ranks % count:
        raise UserError(
            f"{key} does not divide the {ranks} ranks of the actor's group",
            "so many ranks share out each layer's experts: change one of the two numbers",
        )
    if experts.count % count:
        raise UserError(
            f"{key}: the {experts.count} experts of a layer cannot be shared out evenly",
            "use a number that divides them",
        )
