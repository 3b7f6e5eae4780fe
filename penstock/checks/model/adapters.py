"""Checks of the layers and experts that get adapters."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from penstock.base.errors import UserError
from penstock.base.model_code import Code
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import CriticConfig, TrainerConfig
from penstock.engines.families.shape import expert_names, layer_names, read_settings
from penstock.engines.families.table import family_of
from penstock.engines.families.tiny import tiny_shape


def check_targets(config: TrainConfig, offline: str | None = None) -> None:
    """Check that the layers and experts that are to get adapters exist.

    Args:
        offline: what the user calls the section `sft`, where that alone is trained.

    Raises:
        UserError: a model has no layer of such a name, or no experts that are known.
    """
    trained: dict[str, TrainerConfig | None] = {"actor": config.actor, "critic": config.critic, "sft": config.sft}
    if offline is not None:
        trained = {offline: config.sft}
    for key, trainer in trained.items():
        if trainer is None or trainer.lora is None:
            continue
        path = (trainer.path if isinstance(trainer, CriticConfig) else None) or config.model.path
        known = layer_names(Path(path)) if path is not None else _tiny_layers(config)
        if unknown := sorted(set(trainer.lora.targets or ()) - known):
            _refuse_target(f"{key}.lora", unknown[0], known, path)
        if trainer.lora.experts:
            _check_experts_to_adapt(key, path, config.model.code)


def _refuse_target(key: str, name: str, known: set[str], path: str | None) -> NoReturn:
    remedy = f"name linear layers of its blocks: {', '.join(sorted(known))}"
    if path is not None and name in expert_names(Path(path)):
        raise UserError(
            f"{key}.targets names '{name}', and in this model only experts have such",
            f"{key}.experts=true (of a policy); or {remedy}",
        )
    raise UserError(f"{key}.targets names '{name}', and the model has no such layer", remedy)


def _check_experts_to_adapt(key: str, path: str | None, code: Code | None) -> None:
    """Check that the model in a folder, or a tiny one, has experts as the table knows them.

    Raises:
        UserError: it has not.
    """
    settings = {} if path is None else read_settings(Path(path))
    if not family_of(settings.get("model_type", "")).experts:
        raise UserError(
            f"{key}.lora.experts has no effect: the model has no experts, or none that are known here",
            "remove it, or train a mixture of experts of the table in docs/models.md",
        )
    if code is not None:
        raise UserError(
            f"{key}.lora.experts is not for a model with code of its own, whose experts are not known", "remove it"
        )


def _tiny_layers(config: TrainConfig) -> set[str]:
    assert config.model.tiny is not None
    return set(tiny_shape(config.model.tiny).matrices)
