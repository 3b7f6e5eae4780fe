"""Preferences, tokenised: pairs for a policy, responses with a label for KTO, pairs of whole texts for a reward model.

Rows of one prompt stand side by side, so that the forward pass computes the prompt once. A policy's responses end with
EOS, as in penstock/data/sft.py. A reward model sees a text as the reward of a training will show it: prompt and
response tokenised in one, without EOS; what both texts of a pair begin with counts as their prompt.

Left out: the order in which pairs are taken (penstock/data/order.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.preference import (
    PairConfig,
    PairData,
    PreferenceConfig,
    PreferenceData,
    RewardModelConfig,
    RewardModelData,
)
from penstock.data.prompts import encode_prompts, encode_texts
from penstock.data.rows import place, require_columns, require_filled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from penstock.configs.preference import PreferenceLossConfig


@dataclass(frozen=True)
class PreferenceTable:
    """Tokenised preferences: two rows per unit.

    Of pairs the rows 2i (chosen) and 2i + 1 (rejected) are unit i. Of n responses with a label row i is unit i, and
    row n + i joins its prompt with a response to another prompt.

    Attributes:
        prompts: tokens per row.
        responses: tokens per row.
        dropped: units left out because they are too long.
        numbers: further columns, one number per unit: `label` (1 good, 0 bad) or `margin`.
    """

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    dropped: int
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts) // 2

    def columns(self) -> dict[str, Any]:
        """Return the columns of an experience file; a unit's number stands in both of its rows, in units' order."""
        masks = [np.ones(len(row), np.uint8) for row in self.responses]
        return {
            "prompt_tokens": Ragged.of(self.prompts, np.int32),
            "response_tokens": Ragged.of(self.responses, np.int32),
            "loss_mask": Ragged.of(masks, np.uint8),
            **{name: np.concatenate([values, values]).astype(np.float32) for name, values in self.numbers.items()},
        }


def check_columns(frame: pd.DataFrame, data: PairData, source: str) -> None:
    """Check that the columns are there and hold what they should.

    Raises:
        UserError: one is absent, or names the first row at fault.
    """
    labelled = isinstance(data, PreferenceData) and data.label is not None
    texts = [data.response] if isinstance(data, PreferenceData) and labelled else [data.chosen, data.rejected]
    numbers = {"label": getattr(data, "label", None), "margin": getattr(data, "margin", None)}
    require_columns(frame, [data.prompt, *map(str, texts), *(name for name in numbers.values() if name)], source)
    require_filled(frame, data.prompt, source)
    for column in map(str, texts):
        _require_text(frame, column, source)
    if numbers["label"] is not None:
        _labels(frame, numbers["label"], source)
    if numbers["margin"] is not None:
        _margins(frame, numbers["margin"], source)


def tokenize_rows(
    frame: pd.DataFrame, config: PairConfig, tokenizer: PreTrainedTokenizerBase, source: str
) -> PreferenceTable:
    """Return the rows of a file as a training takes them; raises as the two below, one of which it is."""
    if isinstance(config, PreferenceConfig):
        return tokenize_preferences(frame, config.data, config.loss, tokenizer, config.trainer.max_tokens, source)
    assert isinstance(config, RewardModelConfig)
    return tokenize_scored(frame, config.data, tokenizer, config.trainer.max_tokens, source)


def tokenize_preferences(
    frame: pd.DataFrame,
    data: PreferenceData,
    loss: PreferenceLossConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    source: str,
) -> PreferenceTable:
    """Return what a loss takes: pairs, or responses with a label. Units above `max_tokens` are dropped and counted.

    Args:
        frame: rows in the order of their file, checked by `check_columns`.
        data: which columns, which template.
        loss: whether it takes pairs.
        tokenizer: the model's.
        max_tokens: longest prompt with a response and EOS, tokens.
        source: the file's name for errors.

    Raises:
        UserError: the tokenizer has no EOS, every unit is too long, or all labelled rows have the same prompt.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the model's tokenizer has no EOS token: a response could not end", "set eos_token in its folder"
        )
    _, prompts = encode_prompts(frame, data.prompt, data.prompts, tokenizer, source)
    names = (data.response,) if loss.labelled else (data.chosen, data.rejected)
    responses = [_ended(frame[name].tolist(), tokenizer) for name in names]
    if not loss.labelled:
        return _pairs([prompts, prompts], responses, max_tokens, source)
    labels = _labels(frame, str(data.label), source)
    return _with_mismatches(prompts, responses[0], labels, max_tokens, source)


def tokenize_scored(
    frame: pd.DataFrame, data: RewardModelData, tokenizer: PreTrainedTokenizerBase, max_tokens: int, source: str
) -> PreferenceTable:
    """Return pairs of texts for a reward model, with their margins; arguments as for `tokenize_preferences`.

    Raises:
        UserError: every pair is too long.
    """
    texts, _ = encode_prompts(frame, data.prompt, data.prompts, tokenizer, source)
    prompts: list[list[np.ndarray]] = [[], []]
    responses: list[list[np.ndarray]] = [[], []]
    wholes = [
        encode_texts([text + response for text, response in zip(texts, frame[name], strict=True)], tokenizer, False)
        for name in (data.chosen, data.rejected)
    ]
    for pair in zip(*wholes, strict=True):
        begin = _common(*pair)
        for side, tokens in enumerate(pair):
            prompts[side].append(tokens[:begin])
            responses[side].append(tokens[begin:])
    margins = _margins(frame, data.margin, source) if data.margin is not None else np.zeros(len(frame))
    return _pairs(prompts, responses, max_tokens, source, {"margin": margins})


def _pairs(
    prompts: list[list[np.ndarray]],
    responses: list[list[np.ndarray]],
    max_tokens: int,
    source: str,
    numbers: Mapping[str, np.ndarray] | None = None,
) -> PreferenceTable:
    """Interleave chosen and rejected rows; a pair stays if both of them fit."""
    lengths_SU = [
        [len(prompt) + len(response) for prompt, response in zip(*side, strict=True)]
        for side in zip(prompts, responses, strict=True)
    ]
    kept = _kept(np.max(lengths_SU, axis=0), max_tokens, source)
    order = [(side, unit) for unit in kept for side in (0, 1)]
    return PreferenceTable(
        [prompts[side][unit] for side, unit in order],
        [responses[side][unit] for side, unit in order],
        len(prompts[0]) - len(kept),
        {name: values[kept] for name, values in (numbers or {}).items()},
    )


def _with_mismatches(
    prompts: list[np.ndarray], responses: list[np.ndarray], labels: np.ndarray, max_tokens: int, source: str
) -> PreferenceTable:
    """Add to every row one of its prompt and the next response in the file that belongs to another prompt."""
    lengths = np.asarray([len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)])
    kept = _kept(lengths, max_tokens, source)
    prompts, responses = [prompts[row] for row in kept], [responses[row] for row in kept]
    others = _next_of_another([prompt.tobytes() for prompt in prompts], source)
    # A cut response is still one that the policy could have begun with.
    mismatched = [responses[other][: max_tokens - len(prompts[row])] for row, other in enumerate(others)]
    return PreferenceTable(prompts * 2, responses + mismatched, len(lengths) - len(kept), {"label": labels[kept]})


def _next_of_another(prompts: list[bytes], source: str) -> list[int]:
    """For every row the next one, in a circle, with another prompt."""
    count = len(prompts)
    if len(set(prompts)) < 2:
        raise UserError(
            f"{source}: all rows have the same prompt; kto compares with responses to other prompts",
            "give at least two prompts, or pairs and another loss",
        )
    found = [0] * count
    other = 0
    for row in range(2 * count - 1, -1, -1):  # twice round: the last rows' next ones are the first
        if prompts[(row + 1) % count] != prompts[row % count]:
            other = (row + 1) % count
        found[row % count] = other
    return found


def _kept(lengths_U: np.ndarray, max_tokens: int, source: str) -> np.ndarray:
    kept = np.flatnonzero(lengths_U <= max_tokens)
    if not kept.size:
        raise UserError(
            f"every row of {source} is longer than trainer.max_tokens ({max_tokens}): "
            f"the shortest has {lengths_U.min()} tokens",
            f"set trainer.max_tokens to {lengths_U.max()} to keep them all",
        )
    return kept


def _ended(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    return [np.concatenate([body, end]) for body in encode_texts(texts, tokenizer, add_special_tokens=False)]


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Tokens that both begin with."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if different.size else shorter


def _require_text(frame: pd.DataFrame, column: str, source: str) -> None:
    require_filled(frame, column, source)
    for row, value in enumerate(frame[column]):
        if not isinstance(value, str):
            raise UserError(
                f"{place(source, row)}: '{column}' is a {type(value).__name__}, not text", "give the response as text"
            )


def _labels(frame: pd.DataFrame, column: str, source: str) -> np.ndarray:
    for row, value in enumerate(frame[column]):
        if not isinstance(value, bool | np.bool_):
            raise UserError(
                f"{place(source, row)}: '{column}' is {value!r}, neither true nor false", "write true or false"
            )
    return frame[column].to_numpy(dtype=np.float32)


def _margins(frame: pd.DataFrame, column: str, source: str) -> np.ndarray:
    for row, value in enumerate(frame[column]):
        if isinstance(value, bool | str) or value is None or not np.isfinite(value):
            raise UserError(f"{place(source, row)}: '{column}' is {value!r}, not a number", "write a number")
    return frame[column].to_numpy(dtype=np.float32)
