"""Checks of mixtures of experts: routers, their loss and replay, and by what they correct their choice.

Left out: experts that ranks share out (parallel.py), adapters on experts (adapters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.families.routing import REPLAYED
from penstock.engines.families.shape import read_settings
from penstock.engines.families.table import family_of
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import reshard_strategy
from penstock.engines.sizing.memory import weight_width


def check_router_loss(config: TrainConfig) -> None:
    """Check that an actor whose loss is to spread tokens over experts has some, and chooses them by routers' logits.

    Raises:
        UserError: it has none, or does not.
    """
    if not config.algorithm.router_loss_coefficient:
        return
    settings = {} if config.model.path is None else read_settings(Path(config.model.path))
    model_type = settings.get("model_type", "")
    family = family_of(model_type)
    if not family.experts:
        raise UserError(
            "algorithm.router_loss_coefficient has no effect: the model has no experts",
            "remove it, or train a mixture of experts (docs/models.md)",
        )
    if family.corrected:
        raise UserError(
            f"algorithm.router_loss_coefficient is for routers that choose by their logits: those of {model_type}"
            " correct their choice",
            "remove it",
        )


def check_routing(config: TrainConfig) -> None:
    """Check that an actor that is to take the rollout's experts has some, and that they can be replayed.

    Raises:
        UserError: it has none, or its family's routers are not known.
    """
    if not config.actor.replays:
        return
    settings = {} if config.model.path is None else read_settings(Path(config.model.path))
    model_type = settings.get("model_type", "")
    if not family_of(model_type).experts:
        raise UserError(
            "actor.routing=replay has no effect: the model has no experts",
            "remove it, or train a mixture of experts (docs/models.md)",
        )
    if model_type not in REPLAYED:
        raise UserError(
            f"actor.routing=replay: routes of '{model_type}' cannot be replayed, but those of {', '.join(REPLAYED)}",
            "remove it",
        )


def check_corrections(config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Check that the numbers by which an actor's routers correct their choice reach vLLM as they are, in float32.

    Beside bfloat16 weights they do where vLLM takes them from the actor's own memory. DeepSpeed's shards and what is
    sent to another group have one dtype: there they would be rounded, and other experts would be chosen.

    Raises:
        UserError: they do not.
    """
    width = weight_width(config, "cuda" if visible_gpus() else "cpu")
    if not family_of(settings.get("model_type", "")).corrected or width == 4:
        return
    if reshard_strategy(config) != "shared":
        raise UserError(
            f"model.path: routers of {settings['model_type']} correct their choice of experts in float32, and beside "
            "bfloat16 weights they would be rounded on their way to vLLM",
            "set model.dtype=float32, or use another mixture (docs/models.md)",
        )


def check_exact_shards(config: TrainConfig) -> None:
    """Check that no trained model's shards round by what its routers correct their choice: ZeRO-3's have one dtype.

    Raises:
        UserError: they do.
    """
    device = "cuda" if visible_gpus() else "cpu"
    if not config.trains or weight_width(config, device) == 4:
        return
    for trainer in (config.actor, config.critic, config.sft):
        path = getattr(trainer, "path", None) or config.model.path
        if trainer is None or trainer.zero_stage < 3 or path is None:
            continue
        if family_of(read_settings(Path(path)).get("model_type", "")).corrected:
            raise UserError(
                f"zero_stage 3: routers of the model in {path} correct their choice of experts in float32, and beside "
                "bfloat16 weights its shards would round that",
                "set another zero_stage, or model.dtype=float32",
            )
