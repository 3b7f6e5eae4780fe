"""How long the prompts are, before any engine starts: read with the tokenizer's own library, which imports no torch.

With chat messages the template's tokens are not counted, so that lengths are lower bounds. Left out: tokenizers that
have no `tokenizer.json`, and the whole of a large file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.checks.model.chat import check_chat
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import (
    is_templated,
    refuse_chat_arguments,
    refuse_cut_end,
    refuse_other_than_chats,
    refuse_tools,
)
from penstock.data.source import split_of
from penstock.data.tokenizer import DEFAULT_CHARACTERS
from penstock.environments.loading import tools_told

LOOKED_AT = 1000  # rows of a file
USES = {"train": "", "heldout": ": each training is evaluated before and after, whatever evaluate.every is"}


def read_prompts(config: TrainConfig) -> dict[str, pd.DataFrame]:
    """Return the rows of each split.

    Raises:
        UserError: there is no source, or it cannot be read.
    """
    for key, use in USES.items():
        if config.data.made_up is None and getattr(config.data, key) is None:
            raise UserError(
                f"no prompts: 'data.{key}' is not set", f"add data.{key}=FILE, a JSONL or Parquet file of prompts{use}"
            )
    return {split: split_of(config, split) for split in USES}


def check_prompt_lengths(config: TrainConfig, frames: Mapping[str, pd.DataFrame]) -> None:
    """Check that some prompts of each split are short enough, and that there is a chat template where one is needed.

    Raises:
        UserError: none is short enough where longer ones are dropped, or there is no chat template; the end of chats
            would be cut off; a row is no list of messages where others are.
    """
    limit, tools = config.data.max_prompt_tokens, tools_told(config.environment)
    for split, frame in frames.items():
        source, chats = getattr(config.data, split) or f"the {split} data", is_templated(frame, config.data)
        if chats and not config.data.chat:  # a column of messages
            refuse_other_than_chats(frame, config.data.prompt, source)
            check_chat(config)
        if tools is not None and not chats:
            refuse_tools(source)
        if config.data.chat_arguments and not chats:
            refuse_chat_arguments(source)
        refuse_cut_end(config.data, source, chats)
        if config.data.too_long != "drop":
            continue
        lengths_B = prompt_lengths(config, frame.head(LOOKED_AT))
        if lengths_B is not None and lengths_B.min() > limit and len(frame) > LOOKED_AT:
            lengths_B = prompt_lengths(config, frame)
        if lengths_B is not None and lengths_B.min() > limit:
            raise UserError(
                f"every prompt of {source} is longer than data.max_prompt_tokens ({limit}): "
                f"the shortest has {lengths_B.min()} tokens",
                f"set data.max_prompt_tokens to at least {lengths_B.max()} to keep them all",
            )


def describe_prompts(config: TrainConfig) -> list[str]:
    """Return in words how many prompts there are, how long, and how often an iteration takes each."""
    frames = read_prompts(config)
    lengths = {split: prompt_lengths(config, frame.head(LOOKED_AT)) for split, frame in frames.items()}
    described = [_described(config, split, frame, lengths[split]) for split, frame in frames.items()]
    dropped = _too_long(config, lengths["train"]) if config.data.too_long == "drop" else 0
    return described + takes_each(config, len(frames["train"]) - dropped)


def takes_each(config: TrainConfig, rows: int) -> list[str]:
    """Return a line if an iteration takes more prompts than the `rows` that there are."""
    prompts = config.rollout.prompts
    if prompts <= rows:
        return []
    each = "the one prompt" if rows == 1 else f"each of the {rows} prompts"
    return [f"rollout.prompts is {prompts}: an iteration takes {each} {prompts / rows:.3g} times"]


def first_row(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Return the first training prompt without any template, and all columns of its row."""
    (row,) = split_of(config, "train").head(1).to_dict("records")
    return _text(row[config.data.prompt]), {str(name): value for name, value in row.items()}


def prompt_lengths(config: TrainConfig, frame: pd.DataFrame) -> np.ndarray | None:
    """Return the tokens of each prompt, at least; None if this model's tokenizer cannot be asked without torch."""
    if config.data.image_column is not None:
        return None  # what an image takes its processor says
    counter = _tiny_tokens if config.model.path is None else _counter(config.model.path)
    if counter is None:
        return None
    special, template = not is_templated(frame, config.data), config.data.template or "{prompt}"
    texts = [template.replace("{prompt}", _text(value)) for value in frame[config.data.prompt]]
    return np.array([counter(text, special) for text in texts], np.int64)


def _too_long(config: TrainConfig, lengths_B: np.ndarray | None) -> int:
    """Return how many of the prompts that were looked at are too long, as far as their lengths are known."""
    return 0 if lengths_B is None else int((lengths_B > config.data.max_prompt_tokens).sum())


def _described(config: TrainConfig, split: str, frame: pd.DataFrame, lengths_B: np.ndarray | None) -> str:
    limit = config.data.max_prompt_tokens
    prompts = "1 prompt" if len(frame) == 1 else f"{len(frame)} prompts"
    if lengths_B is None:
        return f"{split}: {prompts}"
    some = f"; of the first {LOOKED_AT}:" if len(frame) > LOOKED_AT else ","
    least = ", without the chat template" if is_templated(frame, config.data) else ""
    long = _too_long(config, lengths_B)
    done = "dropped" if config.data.too_long == "drop" else "cut"
    dropped = f"{long} of them longer than data.max_prompt_tokens ({limit}), which are {done}"
    longest = f"up to {lengths_B.max()} tokens{least}"
    return f"{split}: {prompts}{some} {longest}, {dropped if long else 'none too long'}"


def _tiny_tokens(text: str, special: bool) -> int:
    """Return the tokens of a text for the tiny model, which is yet to be made: one per character that it knows."""
    return sum(character in DEFAULT_CHARACTERS for character in text)


@functools.cache
def _counter(folder: str) -> Callable[[str, bool], int] | None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception:  # the library has no other; transformers may know more of what is there, or say what is wrong
        return None
    tokenizer.no_truncation()
    return lambda text, special: len(tokenizer.encode(text, add_special_tokens=special))


def _text(value: Any) -> str:
    """Return a prompt's text, of messages all contents that are text."""
    if isinstance(value, str):
        return value
    contents = [message.get("content") for message in value if isinstance(message, dict)]
    return "".join(content for content in contents if isinstance(content, str))
