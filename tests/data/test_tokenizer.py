"""The character tokenizer: one token per character, through whichever class transformers picks for the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer, Qwen3Config

from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems
from penstock.data.tokenizer import DEFAULT_CHARACTERS, EOS, PAD, make_byte_tokenizer


@pytest.fixture(params=[AutoTokenizer, Qwen2Tokenizer])
def loaded(request: pytest.FixtureRequest, tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    """The folder has a Qwen3 config.json; `Qwen2Tokenizer` rebuilds itself from vocabulary and merges alone."""
    return request.param.from_pretrained(tokenizer_folder)


def test_text_comes_back_one_token_per_character(loaded: PreTrainedTokenizerBase) -> None:
    """Every character alone, all of them together, spaces at the ends, and a problem of the quickstart."""
    texts = [*DEFAULT_CHARACTERS, DEFAULT_CHARACTERS, "  1 ", "12+34=046.", "it is 3 - 4"]
    for text in texts:
        tokens = loaded(text)["input_ids"]
        assert len(tokens) == len(text)
        assert loaded.decode(tokens) == text


def test_the_vocabulary_has_64_tokens(loaded: PreTrainedTokenizerBase, tokenizer_folder: Path) -> None:
    """As many as the model's embedding has rows; loading adds none; PAD and EOS are distinct."""
    config = json.loads((tokenizer_folder / "config.json").read_text())
    assert len(loaded) == loaded.vocab_size == config["vocab_size"] == 64
    assert (loaded.pad_token, loaded.eos_token) == (PAD, EOS)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_nothing_is_added_to_a_text(loaded: PreTrainedTokenizerBase) -> None:
    """With or without `add_special_tokens`; special tokens vanish when they are skipped."""
    assert loaded("1")["input_ids"] == loaded("1", add_special_tokens=False)["input_ids"]
    assert loaded.decode([*loaded("046.")["input_ids"], 1, 0], skip_special_tokens=True) == "046."


def test_unknown_characters_are_unknown_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """One for each byte: none is silently taken for another character."""
    assert tokenizer.convert_ids_to_tokens(tokenizer("1A2é")["input_ids"]) == ["1", "<unk>", "2", "<unk>", "<unk>"]


@pytest.mark.parametrize(
    ("characters", "size"), [("0123456789+=.", 64), ("".join(map(chr, range(32, 127))), 128), ("é", 64)]
)
def test_the_size_is_the_next_multiple_of_64(tmp_path: Path, characters: str, size: int) -> None:
    """Also for characters of several bytes, which take a token for each byte."""
    assert make_byte_tokenizer(tmp_path, characters) == size
    Qwen3Config(vocab_size=size).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size
    tokens = tokenizer(characters)["input_ids"]
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == characters


def test_the_quickstart_needs_no_unknown_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Every problem and every response is within the default characters."""
    for frame in make_problems(ArithmeticData(sft=50, train=50, heldout=50), 0).values():
        for text in frame["prompt"] + frame["response"]:
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
