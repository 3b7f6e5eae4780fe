"""Pairs: prompt tokens as a rollout would send them, response tokens as it would have to produce them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerBase

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.data.prompts import tokenize_prompts
from penstock.data.sft import PairTable, tokenize_pairs

FRAME = pd.DataFrame({"prompt": ["1+2=", "12+34="], "response": ["03.", "046."]})


def _pairs(tokenizer: Any, frame: pd.DataFrame = FRAME, max_tokens: int = 100, **settings: Any) -> PairTable:
    return tokenize_pairs(frame, "prompt", "response", tokenizer, DataConfig(**settings), max_tokens)


@pytest.mark.parametrize("settings", [{}, {"template": "add {prompt}"}, {"chat": True}])
def test_prompts_are_those_of_a_rollout_and_responses_end_with_eos(
    bos_tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> None:
    """Warm-up and reinforcement learning see the same prompt; a response has no BOS and exactly one EOS, its last."""
    pairs = _pairs(bos_tokenizer, **settings)
    prompts = tokenize_prompts(FRAME, DataConfig(**settings), bos_tokenizer, "train")
    for row in range(len(FRAME)):
        np.testing.assert_array_equal(pairs.frame["prompt_tokens"][row], prompts.frame["prompt_tokens"][row])
        response = pairs.frame["response_tokens"][row]
        assert response.dtype == np.int32
        assert bos_tokenizer.decode(response) == FRAME["response"][row] + "<eos>"


def test_over_long_rows_are_dropped_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompt, response and EOS count together: 4 + 3 + 1 tokens just fit."""
    pairs = _pairs(tokenizer, max_tokens=8)
    assert (len(pairs), pairs.dropped) == (1, 1)
    assert tokenizer.decode(pairs.frame["prompt_tokens"][0]) == "1+2="
    with pytest.raises(UserError, match="set sft.max_tokens to 11"):
        _pairs(tokenizer, max_tokens=7)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (FRAME.rename(columns={"response": "respons"}), "no column 'response'\n  did you mean 'respons'"),
        (FRAME.assign(response=["3", None]), "sft.jsonl, line 2: 'response' is null"),
        (FRAME.assign(response=[3, 4]), "sft.jsonl, line 1: 'response' is 3, which is no text"),
        (FRAME.assign(response=[[3], [4]]), "sft.jsonl, line 1: 'response' is a list, neither text nor a list"),
        (FRAME.assign(response=[["[1+2]", "=3 "], ["4"]]), "sft.jsonl, line 1: 'response' has 2 texts"),
        (FRAME.assign(prompt=["3", ""]), "sft.jsonl, line 2: 'prompt' is empty"),
    ],
)
def test_refusals(tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, message: str) -> None:
    """By file and line."""
    with pytest.raises(UserError, match=message):
        _pairs(tokenizer, frame, sft="sft.jsonl")


def test_a_tokenizer_without_eos_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """The model could never learn to stop."""
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        _pairs(tokenizer)


def test_observations_between_turns_are_not_imitated(tokenizer: PreTrainedTokenizerBase) -> None:
    """Each text is tokenised apart; only the model's own, and EOS, count. Control: a text alone counts whole."""
    frame = pd.DataFrame({"prompt": ["1+2=", "1+2="], "response": [["1+2*", "= 3 ", "3."], "3."]})
    pairs = _pairs(tokenizer, frame)
    tokens, mask = pairs.frame["response_tokens"], pairs.frame["loss_mask"]
    assert tokenizer.decode(tokens[0]) == "1+2*= 3 3.<eos>"
    assert mask[0].tolist() == [1] * 4 + [0] * 4 + [1] * 3
    assert (tokenizer.decode(tokens[1]), mask[1].tolist()) == ("3.<eos>", [1, 1, 1])
