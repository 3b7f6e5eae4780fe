"""Checks of the data: the columns and rows of every split, and what a sampler reads of them."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.data import DataConfig
from penstock.data.agents import agent_numbers
from penstock.data.group_filters import load_filter
from penstock.data.images import check_images
from penstock.data.prompts import refuse_reserved
from penstock.data.rows import require_columns, require_filled
from penstock.data.samplers import load_sampler, require_numbers
from penstock.data.source import split_of
from penstock.data.squares import SQUARE_COLUMNS


def check_prompt_selection(config: TrainConfig) -> None:
    """Check that the sampler and the filter load, and that the sampler's column orders the prompts.

    Raises:
        UserError: the first mistake found.
    """
    data, dynamic = config.data, config.algorithm.dynamic_sampling
    if load_sampler(data.sampler).remembers and config.players:
        raise UserError(
            f"data.sampler.name '{data.sampler.name}' draws by what prompts have earned, and a game with "
            "'environment.agents' pays several agents for a prompt",
            "use another sampler",
        )
    if dynamic is not None:
        load_filter(dynamic)
    if (column := data.sampler.column) is None:
        return
    made_up = f"data.{data.made_up}" if data.made_up else str(data.train)
    require_numbers(split_of(config, "train"), column, made_up)


MADE_UP_COLUMNS = {
    "arithmetic": ("prompt_id", "prompt", "answer", "response", "carries"),
    "squares": ("prompt_id", *SQUARE_COLUMNS),
}


def check_prompts(config: TrainConfig, frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Check the rows of each split; return the columns that reward functions can ask for.

    Raises:
        UserError: a missing column, or a row without a prompt.
    """
    data = config.data
    if data.made_up is not None:
        return list(MADE_UP_COLUMNS[data.made_up])
    columns = _columns(data, frames["train"], str(data.train))
    if absent := sorted(set(columns) - set(_columns(data, frames["heldout"], str(data.heldout)))):
        raise UserError(
            f"data.heldout lacks the column '{absent[0]}' that data.train has", "give both the same columns"
        )
    return ["prompt_id", *columns]


def check_heldout(config: TrainConfig) -> list[str]:
    """Check the held-out rows, where nothing is trained; return the columns that reward functions can ask for.

    Raises:
        UserError: there are none, one has no prompt, or a column is missing.
    """
    data = config.data
    if data.made_up is not None:
        return list(MADE_UP_COLUMNS[data.made_up])
    if data.heldout is None:
        raise UserError(
            "no held-out prompts: 'data.heldout' is not set", "add data.heldout=FILE, a JSONL or Parquet file"
        )
    return ["prompt_id", *_columns(data, split_of(config, "heldout"), data.heldout)]


def check_agents(config: TrainConfig, frame: pd.DataFrame) -> None:
    """Check that every training row is for one of the agents.

    Raises:
        UserError: one is not, or there is no such column.
    """
    data, agents = config.data, config.data.agents
    if agents is None:
        return
    agent_numbers(frame, agents, "data.arithmetic" if data.train is None else data.train)


def _columns(data: DataConfig, frame: pd.DataFrame, name: str) -> list[str]:
    require_columns(frame, [data.prompt], name)
    require_filled(frame, data.prompt, name)
    refuse_reserved(frame, name)
    if data.image_column is not None:
        check_images(frame, data.image_column, name)
    return list(frame.columns)


def check_pairs(config: TrainConfig) -> None:
    """Check the supervised data.

    Raises:
        UserError: no source, an unreadable row, a missing column.
    """
    data = config.data
    if data.made_up is not None:
        return
    if data.sft is None or data.response is None:
        missing = "data.sft" if data.sft is None else "data.response"
        raise UserError(f"the 'sft' section needs '{missing}'", f"add {missing}, or remove the section with sft=null")
    frame = split_of(config, "sft")
    require_columns(frame, [data.prompt, data.response], data.sft)
    if data.image_column is not None:
        check_images(frame, data.image_column, data.sft)
