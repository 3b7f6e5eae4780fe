"""Prompts: the tokens are exactly those of the text the model is meant to see.

Invariants: a BOS comes once, whichever of tokenizer and chat template writes it; an id belongs to a row of the file,
whatever is dropped around it; the row's own columns travel along.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.data.prompts import PromptTable, tokenize_prompts
from penstock.data.rows import read_rows
from penstock.state.digests import is_whole

FRAME = pd.DataFrame({"prompt": ["1+2=", "12345+6=", "3+4="], "answer": ["3", "12351", "7"], "level": [1, 2, 3]})
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "add", "name": "x"}, {"role": "user", "content": "1+1"}],
]


def _tokenize(tokenizer: Any, frame: pd.DataFrame = FRAME, **settings: Any) -> PromptTable:
    return tokenize_prompts(frame, DataConfig(**settings), tokenizer, "train")


def test_plain_text_keeps_its_columns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Ids count the rows of the file; tokens are int32; the frame's own columns are all there."""
    table = _tokenize(tokenizer)
    assert list(table.frame) == ["prompt_id", "prompt_text", "prompt_tokens", "prompt", "answer", "level"]
    assert table.frame["prompt_id"].tolist() == ["train-000000", "train-000001", "train-000002"]
    assert table.frame["prompt_text"].tolist() == FRAME["prompt"].tolist()
    assert [tokenizer.decode(tokens) for tokens in table.frame["prompt_tokens"]] == FRAME["prompt"].tolist()
    assert all(tokens.dtype == np.int32 for tokens in table.frame["prompt_tokens"])
    assert table.frame["answer"].tolist() == FRAME["answer"].tolist()
    assert table.dropped == 0


def test_over_long_prompts_are_dropped_and_ids_stay(tokenizer: PreTrainedTokenizerBase) -> None:
    """The limit itself is allowed; the rows after a dropped one keep their ids and their columns."""
    table = _tokenize(tokenizer, max_prompt_tokens=4)
    assert table.frame["prompt_id"].tolist() == ["train-000000", "train-000002"]
    assert table.frame["answer"].tolist() == ["3", "7"]
    assert table.frame.index.tolist() == [0, 1]
    assert table.dropped == 1


@pytest.mark.parametrize(("where", "text"), [("left", "+6="), ("middle", "16="), ("right", "123")])
def test_over_long_prompts_are_cut_where_the_recipe_says(
    where: str, text: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """None is dropped, text and tokens agree, and the count is kept. Control: those of the limit's length are whole."""
    table = _tokenize(tokenizer, max_prompt_tokens=3, too_long=where)
    assert table.frame["prompt_id"].tolist() == ["train-000000", "train-000001", "train-000002"]
    assert table.frame["prompt_text"][1] == text
    assert [tokenizer.decode(tokens) for tokens in table.frame["prompt_tokens"]] == table.frame["prompt_text"].tolist()
    assert (table.dropped, table.cut) == (0, 3)
    table.save(tmp_path / "prompts.parquet")
    assert PromptTable.load(tmp_path / "prompts.parquet").cut == 3
    four = _tokenize(tokenizer, max_prompt_tokens=4, too_long=where)
    assert (four.frame["prompt_text"][0], four.cut) == ("1+2=", 1)


def test_a_prompt_that_is_cut_begins_as_the_tokenizer_begins_one(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Its BOS stays, which is no part of the text. Control: in a chat it is the template's, and goes with the rest."""
    begin = bos_tokenizer.eos_token_id
    for where, text in (("left", "+6="), ("middle", "16="), ("right", "123")):
        table = _tokenize(bos_tokenizer, max_prompt_tokens=4, too_long=where)
        assert table.frame["prompt_tokens"][1].tolist() == bos_tokenizer(text)["input_ids"]
        assert table.frame["prompt_text"][1] == text
    chat = _tokenize(bos_tokenizer, chat=True, max_prompt_tokens=8, too_long="left")
    assert begin not in chat.frame["prompt_tokens"][1].tolist()
    middle = _tokenize(bos_tokenizer, chat=True, max_prompt_tokens=8, too_long="middle").frame["prompt_text"][1]
    assert middle.startswith("<eos>u.") and middle.endswith("=a.")
    with pytest.raises(UserError, match="where the model's message begins"):
        _tokenize(bos_tokenizer, chat=True, too_long="right")


def test_all_dropped_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    """It names the limit that would keep them."""
    with pytest.raises(UserError, match="set data.max_prompt_tokens to 8"):
        _tokenize(tokenizer, max_prompt_tokens=3)


def test_a_template_is_filled_literally(tokenizer: PreTrainedTokenizerBase) -> None:
    """Other braces stay as they are (`{x}` would break str.format), and braces in the prompt too."""
    frame = pd.DataFrame({"prompt": ["1+{prompt}"]})
    assert _tokenize(tokenizer, frame, template="{x} {prompt} =").frame["prompt_text"][0] == "{x} 1+{prompt} ="


def test_text_gets_the_tokenizers_own_bos(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Plain text is tokenised as the model was trained: with the special tokens the tokenizer adds."""
    tokens = _tokenize(bos_tokenizer).frame["prompt_tokens"][0]
    assert tokens.tolist() == bos_tokenizer("1+2=")["input_ids"]
    assert (tokens == bos_tokenizer.eos_token_id).sum() == 1


def test_chat_has_one_bos(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """The template has written it; the control shows that the tokenizer would add a second."""
    table = _tokenize(bos_tokenizer, chat=True, template="add {prompt}")
    text, tokens = table.frame["prompt_text"][0], table.frame["prompt_tokens"][0]
    assert text == "<eos>u.add 1+2=a."
    assert (tokens == bos_tokenizer.eos_token_id).sum() == 1
    assert bos_tokenizer(text)["input_ids"].count(bos_tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_messages_go_through_the_chat_template(
    bos_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, suffix: str
) -> None:
    """From either format; a key that only some messages have does not appear as null in the others."""
    path = tmp_path / f"chats.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in CHATS))
    else:
        pq.write_table(pa.table({"prompt": pa.array(CHATS)}), path)
    bos_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.keys() | sort | join('.') + '=' + m.content }}{% endfor %}"
    )
    texts = _tokenize(bos_tokenizer, read_rows(path)).frame["prompt_text"].tolist()
    assert texts == ["content.role=hi", "content.name.role=addcontent.role=1+1"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tool_calls_reach_the_template_as_they_are_written(
    bos_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, suffix: str
) -> None:
    """Lists are lists at every depth, and no call has the arguments of another one, of this or of another row."""
    calls = [{"name": "add", "arguments": {"terms": [1, 2]}}, {"name": "ask", "arguments": {"of": {"who": "me"}}}]
    chats = [[{"role": "assistant", "content": "", "tool_calls": calls[:count]}] for count in (1, 2)]
    path = tmp_path / f"chats.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    else:
        pq.write_table(pa.table({"prompt": pa.array(chats)}), path)
    bos_tokenizer.chat_template = "{% if messages[0].tool_calls %}{{ messages[0].tool_calls | tojson }}{% endif %}"
    texts = _tokenize(bos_tokenizer, read_rows(path)).frame["prompt_text"].tolist()
    assert [json.loads(text) for text in texts] == [calls[:1], calls]


def test_arguments_reach_the_chat_template(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """For texts that become messages and for messages alike. Controls: none, one that is not read, and no chat."""
    bos_tokenizer.chat_template = (
        "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}slow{% endif %}"
    )
    for frame, chat in ((FRAME, True), (pd.DataFrame({"prompt": CHATS}), False)):
        for arguments, text in (
            ({"enable_thinking": False}, "quick"),
            ({"enable_thinking": True}, "slow"),
            ({}, "slow"),
        ):
            table = _tokenize(bos_tokenizer, frame, chat=chat, chat_arguments=arguments)
            assert set(table.frame["prompt_text"]) == {text}
    with pytest.raises(UserError, match="'thinking', which the model's chat template does not read"):
        _tokenize(bos_tokenizer, chat=True, chat_arguments={"thinking": False})
    with pytest.raises(UserError, match="no effect on the text prompts"):
        _tokenize(bos_tokenizer, chat_arguments={"enable_thinking": False})
    with pytest.raises(ValueError, match="'tokenize', which is set for every prompt"):
        DataConfig(chat=True, chat_arguments={"tokenize": True})


def test_chat_needs_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Neither wrapping a text nor a column of messages goes through without one."""
    for frame, chat in ((FRAME, True), (pd.DataFrame({"prompt": CHATS}), False)):
        with pytest.raises(UserError, match="no chat template"):
            _tokenize(tokenizer, frame, chat=chat)


def test_what_a_chat_template_refuses_is_named(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    """Templates raise for roles they do not know."""
    bos_tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}a"
    with pytest.raises(UserError, match="row 2: the chat template refuses these messages: no system"):
        _tokenize(bos_tokenizer, pd.DataFrame({"prompt": CHATS}))


@pytest.mark.parametrize("use", ["messages[0].content + 1", "'%d' | format(messages[0].content)"])
def test_values_of_a_kind_that_a_chat_template_cannot_use_are_named(
    bos_tokenizer: PreTrainedTokenizerBase, use: str
) -> None:
    """Jinja passes Python's own errors on."""
    bos_tokenizer.chat_template = "{{ " + use + " }}"
    with pytest.raises(UserError, match="row 1: the chat template refuses these messages"):
        _tokenize(bos_tokenizer, pd.DataFrame({"prompt": CHATS}))


@pytest.mark.parametrize(
    ("frame", "settings", "message"),
    [
        (FRAME.rename(columns={"answer": "prompt_id"}), {}, "has a column 'prompt_id', a name Penstock uses"),
        (FRAME, {"prompt": "promt"}, "no column 'promt'\n  did you mean 'prompt'"),
        (pd.DataFrame({"prompt": ["1", None]}), {"train": "a.jsonl"}, "a.jsonl, line 2: 'prompt' is null"),
        (pd.DataFrame({"prompt": CHATS}), {"template": "a {prompt}"}, "no effect on a column of messages"),
        (pd.DataFrame({"prompt": [["1", "2"]]}), {}, "row 1: 'prompt' is neither text nor a list of messages"),
    ],
)
def test_refusals(
    bos_tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, settings: dict[str, Any], message: str
) -> None:
    """Each says which column or row, and in which file where there is one."""
    with pytest.raises(UserError, match=message):
        _tokenize(bos_tokenizer, frame, **settings)


def test_a_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """A tokenizer that knows none of the characters encodes to nothing, and an engine would fail on it later."""
    tokenizer.backend_tokenizer.model.unk_token = None  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="row 2: the prompt has no tokens"):
        _tokenize(tokenizer, pd.DataFrame({"prompt": ["1", "ÄÖ"]}))


def test_a_saved_table_loads_as_it_was(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """All columns, the int32 tokens and the count of dropped prompts; nothing else is left in the folder."""
    table = _tokenize(tokenizer, max_prompt_tokens=4)
    path = tmp_path / "prompts.parquet"
    table.save(path)
    table.save(path)
    loaded = PromptTable.load(path)
    assert loaded.dropped == table.dropped == 1
    assert list(loaded.frame) == list(table.frame)
    for name in table.frame.columns.drop("prompt_tokens"):
        assert loaded.frame[name].tolist() == table.frame[name].tolist()
    for before, after in zip(table.frame["prompt_tokens"], loaded.frame["prompt_tokens"], strict=True):
        assert after.dtype == np.int32
        np.testing.assert_array_equal(before, after)
    assert pq.read_schema(path).field("prompt_tokens").type == pa.list_(pa.int32())
    assert is_whole(path)
    assert len([*tmp_path.iterdir()]) == 2  # itself and its mark
