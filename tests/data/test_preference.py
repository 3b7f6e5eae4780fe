"""Preferences become rows: pairs adjacent, mismatches of other prompts, a reward model's text as rewards show it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerBase

from penstock.base.errors import UserError
from penstock.configs.preference import PreferenceData, PreferenceLossConfig, RewardModelData
from penstock.data.preference import check_columns, tokenize_preferences, tokenize_scored

PAIRS = pd.DataFrame(
    {"prompt": ["1+1=", "2+2="], "chosen": ["2.", "4."], "rejected": ["3.", "4444444444."], "margin": [0.5, 2.0]}
)
LABELLED = pd.DataFrame(
    {
        "prompt": ["1+1=", "1+1=", "22+22=", "3+3="],
        "response": ["2.", "3.", "4.", "6666."],
        "label": [True, False, True, True],
    }
)


def pair_data(**more: Any) -> PreferenceData:
    return PreferenceData(train="f.jsonl", chosen="chosen", rejected="rejected", **more)


LABEL_DATA = PreferenceData(train="f.jsonl", response="response", label="label")
DPO, KTO = PreferenceLossConfig(), PreferenceLossConfig(name="kto")


def text(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> str:
    return str(tokenizer.decode(tokens.tolist()))


def test_a_pair_is_two_adjacent_rows_that_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Chosen first; a pair goes as a whole where one of its responses is too long."""
    table = tokenize_preferences(PAIRS, pair_data(), DPO, tokenizer, 99, "f.jsonl")
    rows = [text(tokenizer, p) + text(tokenizer, r) for p, r in zip(table.prompts, table.responses, strict=True)]
    assert rows == ["1+1=2.<eos>", "1+1=3.<eos>", "2+2=4.<eos>", "2+2=4444444444.<eos>"]
    short = tokenize_preferences(PAIRS, pair_data(), DPO, tokenizer, 8, "f.jsonl")
    assert (len(short), short.dropped) == (1, 1)
    with pytest.raises(UserError, match="longer than trainer.max_tokens"):
        tokenize_preferences(PAIRS, pair_data(), DPO, tokenizer, 5, "f.jsonl")


def test_a_mismatch_is_the_next_response_to_another_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    """In a circle; rows of the same prompt are passed over, and long ones are cut."""
    table = tokenize_preferences(LABELLED, LABEL_DATA, KTO, tokenizer, 10, "f.jsonl")
    mismatched = [text(tokenizer, row) for row in table.responses[4:]]
    assert mismatched == ["4.<eos>", "4.<eos>", "6666", "2.<eos>"]
    assert [row.tolist() for row in table.prompts[4:]] == [row.tolist() for row in table.prompts[:4]]
    assert table.columns()["label"].tolist() == [1, 0, 1, 1] * 2
    with pytest.raises(UserError, match="the same prompt"):
        tokenize_preferences(LABELLED[:2], LABEL_DATA, KTO, tokenizer, 9, "f.jsonl")


def test_a_reward_model_sees_the_text_that_a_reward_shows_it(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompt and response in one, no EOS, no second BOS; what both begin with is computed once."""
    data = RewardModelData(train="f.jsonl", margin="margin")
    table = tokenize_scored(PAIRS, data, bos_tokenizer, 99, "f.jsonl")
    rows = [np.concatenate(parts).tolist() for parts in zip(table.prompts, table.responses, strict=True)]
    texts = ["1+1=2.", "1+1=3.", "2+2=4.", "2+2=4444444444."]
    assert rows == [bos_tokenizer(item, add_special_tokens=False)["input_ids"] for item in texts]
    assert [text(bos_tokenizer, row) for row in table.prompts] == ["1+1=", "1+1=", "2+2=4", "2+2=4"]
    assert table.columns()["margin"].tolist() == [0.5, 2.0] * 2


def test_columns_and_prompts_are_those_that_the_recipe_names(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Pairs and labelled rows under other names, a template around the prompt, and the tokenizer's chat around that."""
    other = {"prompt": "question", "chosen": "good", "rejected": "bad", "response": "said", "label": "right"}
    named = pair_data(prompt="question", template="a{prompt}b", chat=True).model_copy(
        update={"chosen": "good", "rejected": "bad"}
    )
    table = tokenize_preferences(PAIRS.rename(columns=other), named, DPO, bos_tokenizer, 99, "f.jsonl")
    assert text(bos_tokenizer, table.prompts[0]) == "<eos>u.a1+1=ba."
    assert [text(bos_tokenizer, row) for row in table.responses[:2]] == ["2.<eos>", "3.<eos>"]

    named = PreferenceData(train="f.jsonl", prompt="question", response="said", label="right")
    table = tokenize_preferences(LABELLED.rename(columns=other), named, KTO, bos_tokenizer, 99, "f.jsonl")
    assert [text(bos_tokenizer, row) for row in table.responses[:2]] == ["2.<eos>", "3.<eos>"]
    assert table.columns()["label"].tolist() == [1, 0, 1, 1] * 2


def test_arguments_of_the_chat_template_are_those_of_the_recipe(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Control: without them the template has its own default."""
    bos_tokenizer.chat_template = "{{ '1' if enable_thinking else '2' }}"
    for arguments, expected in (({"enable_thinking": True}, "1"), ({}, "2")):
        data = pair_data(chat=True, chat_arguments=arguments)
        table = tokenize_preferences(PAIRS, data, DPO, bos_tokenizer, 99, "f.jsonl")
        assert text(bos_tokenizer, table.prompts[0]) == expected


@pytest.mark.parametrize(
    ("frame", "data", "message"),
    [
        (PAIRS.rename(columns={"chosen": "choosen"}), pair_data(), "did you mean 'choosen'"),
        (PAIRS.assign(rejected=["", "a"]), pair_data(), "line 1: 'rejected' is empty"),
        (PAIRS.assign(chosen=[["a"], ["b"]]), pair_data(), "'chosen' is a list, not text"),
        (LABELLED.assign(label=[1, 0, 1, 1]), LABEL_DATA, "neither true nor false"),
        (
            PAIRS.assign(margin=[1.0, np.nan]),
            RewardModelData(train="f.jsonl", margin="margin"),
            "line 2: 'margin' is nan, not a number",
        ),
    ],
)
def test_mistakes_are_named_by_their_line(frame: pd.DataFrame, data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_columns(frame, data, "f.jsonl")
