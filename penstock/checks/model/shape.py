"""The sizes of the model of a role, by its configuration or its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import ModelShape, read_shape
from penstock.engines.families.tiny import tiny_shape


def shape_of(config: TrainConfig, role: Role = "actor") -> ModelShape:
    """Return the sizes of the model of a role."""
    if role == "reward":
        return read_shape(Path(str(config.reward.model)))
    tiny, path = config.model.tiny, str(config.model.path)
    if role == "critic" and config.critic is not None and config.critic.path is not None:
        tiny, path = None, config.critic.path
    shape = tiny_shape(tiny) if tiny is not None else read_shape(Path(path))
    return replace(shape, encoder_learns=config.model.train_encoder)
