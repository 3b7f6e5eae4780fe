"""Prompt/response pairs for supervised training, tokenised exactly as a rollout would see and produce them.

Prompt and response are tokenised apart and then joined, because that is what sampling does: the model never sees a
token that spans both. Every response ends with EOS, so the model learns to stop.

A response of several turns is a list of texts, the model's and observations in turn. Each is tokenised apart for the
same reason, and observations are not imitated: their tokens have the mask 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.data.images import ImageFolder
from penstock.data.prompts import Tools, encode_prompts, encode_texts, place_images
from penstock.data.rows import place, require_columns, require_filled
from penstock.state.experience import IMAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairTable:
    """Tokenised pairs.

    Attributes:
        frame: `prompt_tokens` and `response_tokens` (int32 arrays; the response ends with EOS), and `loss_mask`, 0 for
            tokens of observations.
            Where prompts may have images `images` has four numbers of each (penstock/data/images.py).
        dropped: pairs left out because they are too long.
    """

    frame: pd.DataFrame
    dropped: int

    def __len__(self) -> int:
        return len(self.frame)


def tokenize_pairs(
    frame: pd.DataFrame,
    prompt_column: str,
    response_column: str,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    max_tokens: int,
    tools: Tools | None = None,
    images: ImageFolder | None = None,
) -> PairTable:
    """Return the pairs; those above `max_tokens` (prompt, response and EOS together) are dropped and counted.

    Args:
        frame: rows in the order of their file.
        prompt_column: text or messages, formatted as `config` says.
        response_column: text, or a list of texts: the model's turn, an observation, the model's turn, ...
        tokenizer: the actor's.
        config: template, chat and the name of the file for errors.
        max_tokens: longest row, tokens.
        tools: what the chat template is told of tools; None: there are none.
        images: where those of the rows are kept; None: they have none.

    Raises:
        UserError: a column is absent, a value is empty, the tokenizer has no EOS, or every pair is too long.
    """
    source = config.sft or "the sft data"
    require_columns(frame, [prompt_column, response_column], source)
    turns = _turns(frame, response_column, source)
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the model's tokenizer has no EOS token: a response could not end", "set eos_token in its folder"
        )
    _, prompts = encode_prompts(frame, prompt_column, config, tokenizer, source, tools)
    seen = {} if images is None else {IMAGES: place_images(frame, prompts, config, images, source)}
    responses, masks = _encode_turns(turns, tokenizer)
    lengths = np.asarray([len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)])
    kept = lengths <= max_tokens
    if not kept.any():
        raise UserError(
            f"every row of {source} is longer than sft.max_tokens ({max_tokens}): "
            f"the shortest has {lengths.min()} tokens",
            f"set sft.max_tokens to {lengths.max()} to keep them all",
        )
    pairs = pd.DataFrame({"prompt_tokens": prompts, "response_tokens": responses, "loss_mask": masks, **seen})
    return PairTable(pairs[kept].reset_index(drop=True), int((~kept).sum()))


def _encode_turns(
    turns: list[list[str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens (int32) of every response, EOS last, and their mask."""
    encoded = iter(encode_texts([text for row in turns for text in row], tokenizer, add_special_tokens=False))
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    responses, masks = [], []
    for row in turns:
        parts = [*(next(encoded) for _ in row), end]
        own = [*(number % 2 == 0 for number in range(len(row))), True]
        responses.append(np.concatenate(parts))
        masks.append(np.repeat(np.asarray(own, np.int32), [len(part) for part in parts]))
    return responses, masks


def _turns(frame: pd.DataFrame, column: str, source: str) -> list[list[str]]:
    """Return every response as a list of turns.

    Raises:
        UserError: one is neither text nor a list of texts that ends with the model's.
    """
    require_filled(frame, column, source)
    turns = []
    for row, value in enumerate(frame[column]):
        texts = [value] if isinstance(value, str) else list(value)
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{place(source, row)}: '{column}' is a {type(value).__name__}, neither text nor a list of texts",
                "give the response as text, or its turns and the observations between them as a list",
            )
        if len(texts) % 2 == 0:
            raise UserError(
                f"{place(source, row)}: '{column}' has {len(texts)} texts, so that the last one is an observation",
                "end the list with the model's own text",
            )
        turns.append(texts)
    return turns
