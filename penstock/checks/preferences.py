"""Checks before training on preferences, of a policy or a reward model: the model, and the rows of both splits.

Left out: memory (penstock/checks/memory.py), and what a loss takes (penstock/configs/preference.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.checks.model.adapters import check_targets
from penstock.checks.model.chat import check_chat
from penstock.checks.model.folder import check_one_label
from penstock.checks.model.images import refuse_sight
from penstock.checks.model.starting_model import check_model
from penstock.configs.preference import PairConfig, RewardModelConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.data.preference import check_columns
from penstock.data.source import reading_once, rows_of
from penstock.trackers.table import check_trackers


@reading_once()
def check_preferences(config: PairConfig) -> None:
    """Check everything that can be seen without an engine.

    Raises:
        UserError: the first mistake found.
    """
    engines, data, scores = config.engines(), config.data, isinstance(config, RewardModelConfig)
    refuse_sight(config.model.path, "rows of preferences have no images")
    check_model(engines, scores, pairs=True)
    check_trackers(names_of_trackers(config.tracker), "tracker")
    if scores and config.model.path is not None:
        check_one_label(Path(config.model.path), "model.path")
    check_targets(engines, "trainer")
    if data.train is None:
        raise UserError("nothing to train on: 'data.train' is not set", "add data.train=FILE, JSONL or Parquet")
    if data.chat:
        check_chat(engines)
    for file in (data.train, data.heldout):
        if file is not None:
            check_columns(rows_of(Path(file)), data, file)
