"""Prompt/response pairs for supervised training, tokenised exactly as a rollout would see and produce them.

Prompt and response are tokenised apart and then joined, because that is what sampling does: the model never sees a
token that spans both. Every response ends with EOS, so the model learns to stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from configs.errors import UserError
from configs.schema import DataConfig
from data.prompts import encode_prompts, encode_texts
from data.rows import place, require_columns, require_filled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairTable:
    """Tokenised pairs.

    Attributes:
        frame: `prompt_tokens` and `response_tokens` (int32 arrays; the response ends with EOS).
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
) -> PairTable:
    """Return the pairs; those above `max_tokens` (prompt, response and EOS together) are dropped and counted.

    Args:
        frame: rows in the order of their file.
        prompt_column: text or messages, formatted as `config` says.
        response_column: text.
        tokenizer: the actor's.
        config: template, chat and the name of the file for errors.
        max_tokens: longest row, tokens.

    Raises:
        UserError: a column is absent, a value is empty, the tokenizer has no EOS, or every pair is too long.
    """
    source = config.sft or "the sft data"
    require_columns(frame, [prompt_column, response_column], source)
    _require_text(frame, response_column, source)
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the model's tokenizer has no EOS token: a response could not end", "set eos_token in its folder"
        )
    _, prompts = encode_prompts(frame, prompt_column, config, tokenizer, source)
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    bodies = encode_texts(frame[response_column].tolist(), tokenizer, add_special_tokens=False)
    responses = [np.concatenate([body, end]) for body in bodies]
    lengths = np.asarray([len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)])
    kept = lengths <= max_tokens
    if not kept.any():
        raise UserError(
            f"every row of {source} is longer than sft.max_tokens ({max_tokens}): "
            f"the shortest has {lengths.min()} tokens",
            f"set sft.max_tokens to {lengths.max()} to keep them all",
        )
    pairs = pd.DataFrame({"prompt_tokens": prompts, "response_tokens": responses})
    return PairTable(pairs[kept].reset_index(drop=True), int((~kept).sum()))


def _require_text(frame: pd.DataFrame, column: str, source: str) -> None:
    require_filled(frame, column, source)
    for row, value in enumerate(frame[column]):
        if not isinstance(value, str):
            raise UserError(
                f"{place(source, row)}: '{column}' is a {type(value).__name__}, not text", "give the response as text"
            )
