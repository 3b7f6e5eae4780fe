"""Checks of models whose layers carry a state from token to token: what nobody has compared of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import read_settings
from penstock.engines.families.table import family_of


def check_states(config: TrainConfig) -> None:
    """Refuse what nobody has compared yet of a model whose layers carry a state from token to token.

    Raises:
        UserError: names it.
    """
    if config.reward.model is not None and _carries_states(Path(config.reward.model)):
        raise UserError(
            f"reward.model: the model in {config.reward.model} has layers that carry a state from token to token, and "
            "scores of such a model are not compared yet",
            "use another model",
        )
    critic = None if config.critic is None else config.critic.path
    for path in dict.fromkeys((config.model.path, critic or config.model.path)):
        if path is not None and _carries_states(Path(path)) and (names := _uncompared(config, path)):
            raise UserError(
                f"the model in {path} has layers that carry a state from token to token, and does not go with "
                f"{', '.join(names)}: that trainer and rollout agree there is not shown yet",
                "remove it, or use another model",
            )


def _uncompared(config: TrainConfig, path: str) -> list[str]:
    """Return what a configuration does with the model in a folder that nobody has compared of one with a state."""
    rollout, of_actor = config.rollout, path == config.model.path
    trained: list[Any] = [config.actor, config.sft] if of_actor else []
    if config.critic is not None and (config.critic.path or config.model.path) == path:
        trained.append(config.critic)
    trained = [one for one in trained if one is not None] if config.trains else []
    given = {
        "keep_kv_cache": of_actor and rollout.keeps_kv_cache,
        "rollout.tensor_parallel above 1": of_actor and rollout.tensor_parallel > 1,
        "sequence_parallel": any(getattr(one, "sequence_parallel", 1) > 1 for one in trained),
        "expert_parallel": any(getattr(one, "expert_parallel", 1) > 1 for one in trained),
        "zero_stage 3": any(one.zero_stage == 3 for one in trained),
    }
    return [name for name, is_given in given.items() if is_given]


def check_no_states(folder: Path, purpose: str) -> None:
    """Refuse a model whose layers carry a state from token to token where nobody has compared what is trained.

    Raises:
        UserError: names the purpose.
    """
    if _carries_states(folder):
        raise UserError(
            f"the model in {folder} has layers that carry a state from token to token, and does not go with {purpose}: "
            "what such layers learn there is not compared yet",
            "use another model",
        )


def _carries_states(folder: Path) -> bool:
    return (folder / "config.json").is_file() and bool(family_of(read_settings(folder).get("model_type", "")).mixers)
