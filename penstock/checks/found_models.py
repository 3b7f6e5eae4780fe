"""Names of models become folders: once, when a run begins, and its configuration keeps them.

A name is that of a registered version (registered.py) or of a model of the Hugging Face Hub (hub.py); anything else is
a folder already.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, cast

from penstock.checks.hub import revision_of, snapshot
from penstock.checks.registered import registered
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig

Tree = TypeVar("Tree", bound=TrainConfig | PairConfig)


def with_models_found(config: Tree) -> Tree:
    """Return a configuration whose models are folders; where `model.path` comes from is noted beside it.

    Raises:
        UserError: see `registered` and `snapshot`.
    """
    config = _with_model(config)
    if isinstance(config, TrainConfig):
        config = cast(Tree, _with_folder(_with_folder(config, "critic", "path"), "reward", "model"))
    return config


def _with_model(config: Tree) -> Tree:
    path = config.model.path
    if path is None:
        return config
    if (version := registered(path, Path(config.folder))) is not None:
        return _changed(config, "model", {"path": str(version.folder), "version": str(version)})
    if (folder := snapshot(path, "model.path")) is not None:
        return _changed(config, "model", {"path": str(folder), "revision": revision_of(folder)})
    return config


def _with_folder(config: TrainConfig, section: str, key: str) -> TrainConfig:
    """Let a key of a section, if both are there, name a folder."""
    named = getattr(getattr(config, section), key, None)
    folder = None if named is None else snapshot(named, f"{section}.{key}")
    return config if folder is None else _changed(config, section, {key: str(folder)})


def _changed(config: Tree, section: str, values: dict[str, str | None]) -> Tree:
    changed = getattr(config, section).model_copy(update=values)
    return cast(Tree, config.model_copy(update={section: changed}))
