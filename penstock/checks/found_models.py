"""Names of models become folders: once, when a run begins, and its configuration keeps them.

A name is that of a registered version (registered.py) or of a model of the Hugging Face Hub (hub.py); anything else is
a folder already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.base.model_code import code_of
from penstock.checks.hub import moves, revision_of, snapshot
from penstock.checks.model.own_code import check_noted
from penstock.checks.registered import is_alias, registered
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig

Tree = TypeVar("Tree", bound=TrainConfig | PairConfig)


def with_models_found(config: Tree) -> Tree:
    """Return a configuration whose models are folders; noted are where `model.path` comes from, and its code.

    Raises:
        UserError: see `registered`, `snapshot` and `check_noted`.
    """
    named, config = config.model.path, _with_model(config)
    if named is not None and (moves(named) or is_alias(named)):
        check_noted(config.model, named, Path(str(config.model.path)))
    config = with_code(config)
    if isinstance(config, TrainConfig):
        config = cast(Tree, _with_folder(_with_folder(config, "critic", "path"), "reward", "model"))
    return config


def with_code(config: Tree) -> Tree:
    """Return a configuration that has the files of code noted, which its model's folder is trusted to bring."""
    model = config.model
    if not model.trust_remote_code or model.code is not None:
        return config
    return _changed(config, "model", {"code": code_of(str(model.path)) or None})


def _with_model(config: Tree) -> Tree:
    path = config.model.path
    if path is None:
        return config
    if (version := registered(path, Path(config.folder))) is not None:
        return _changed(config, "model", {"path": str(version.folder), "version": str(version)})
    if (folder := snapshot(path, "model.path", config.model.trust_remote_code)) is not None:
        return _changed(config, "model", {"path": str(folder), "revision": revision_of(folder)})
    return config


def _with_folder(config: TrainConfig, section: str, key: str) -> TrainConfig:
    """Let a key of a section, if both are there, name a folder."""
    named = getattr(getattr(config, section), key, None)
    folder = None if named is None else snapshot(named, f"{section}.{key}")
    return config if folder is None else _changed(config, section, {key: str(folder)})


def _changed(config: Tree, section: str, values: dict[str, Any]) -> Tree:
    changed = getattr(config, section).model_copy(update=values)
    return cast(Tree, config.model_copy(update={section: changed}))
