"""Checks of models whose layers carry a state from token to token: what nobody has compared of them is refused."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import TrainerConfig
from penstock.engines.families.shape import read_settings
from penstock.engines.families.table import MAMBA, Family, family_of

SCAN_BY_PRODUCTS = Version("5.18")  # of the Transformers library


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
    trainers: dict[str | None, list[TrainerConfig | None]] = {config.model.path: [config.actor, config.sft]}
    if config.critic is not None:
        trainers.setdefault(config.critic.path or config.model.path, []).append(config.critic)
    for path, of_folder in trainers.items():
        if path is None or not _carries_states(Path(path)):
            continue
        trained = [one for one in of_folder if one is not None and config.trains]
        if names := _uncompared(config, trained, generates=path == config.model.path):
            raise UserError(
                f"the model in {path} has layers that carry a state from token to token, and does not go with "
                f"{', '.join(names)}: that trainer and rollout agree there is not shown yet",
                "remove it, or use another model",
            )


def _uncompared(config: TrainConfig, trained: Sequence[TrainerConfig], generates: bool) -> list[str]:
    """Return what is done with a folder's model that nobody has compared of one with a state.

    Args:
        trained: the sections that train it.
        generates: it is the actor's.
    """
    given = {
        "keep_kv_cache": generates and config.rollout.keeps_kv_cache,
        "rollout.tensor_parallel above 1": generates and config.rollout.tensor_parallel > 1,
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


def check_scan(where: str, family: Family) -> None:
    """Check that the library computes Mamba 2 by products: older ones write out each pair of tokens for all of a state.

    Raises:
        UserError: it does not, and a GPU has no memory for that.
    """
    if family.stacked == MAMBA and Version(version("transformers")) < SCAN_BY_PRODUCTS:
        raise UserError(
            f"{where} has layers of Mamba 2, for which transformers {version('transformers')} needs a number of each "
            "state for each pair of tokens in a chunk",
            f"install transformers {SCAN_BY_PRODUCTS} or newer",
        )


def _carries_states(folder: Path) -> bool:
    return (folder / "config.json").is_file() and bool(family_of(read_settings(folder).get("model_type", "")).mixers)
