"""Decoding a batch gives what the tokenizer gives row by row: from a table of bytes, or by the tokenizer's own loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.make_model import byte_tokenizer
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.rollout import detokenize as decoding
from penstock.engines.rollout.detokenize import decode


def _expected(tokenizer: Any, responses: Ragged) -> list[str]:
    rows = [responses.row(index).tolist() for index in range(len(responses))]
    return [tokenizer.backend_tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _of_bytes() -> Any:
    """A token per byte; added tokens with characters that no byte-level token has, and special ones."""
    tokenizer = byte_tokenizer()
    plain = [AddedToken(text, special=False) for text in ("<two words>", "日本", "Ġ日", "é\u00ad")]
    tokenizer.add_tokens([*plain, AddedToken("<|end of turn|>", special=True)])
    return tokenizer


def _of_words() -> Any:
    vocabulary = {"<unk>": 0, "one": 1, "two": 2, "</s>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("highest", [256, 300, 160_000])
def test_bytes_are_joined_as_the_tokenizer_joins_them(highest: int) -> None:
    """Also where they are no UTF-8, where tokens are special or added, and for ids that no token has."""
    tokenizer, random = _of_bytes(), np.random.default_rng(highest)
    added = np.arange(len(tokenizer) - 7, len(tokenizer) + 3)
    rows = [random.integers(0, highest, length) for length in random.integers(0, 12, 3000)]
    rows += [random.choice(np.concatenate([added, np.arange(128, 256)]), 6) for _ in range(500)]
    responses = Ragged.of(rows, np.int32)
    texts = decode(tokenizer, responses)
    assert texts == _expected(tokenizer, responses)
    assert any("\ufffd" in text for text in texts)
    assert any("<two words>" in text for text in texts)
    assert not any("<|end of turn|>" in text for text in texts)


def test_other_tokenizers_decode_with_their_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word-level vocabulary puts spaces between tokens, which no table of bytes knows: the table is not asked."""
    monkeypatch.setattr(decoding, "_token_bytes", _never)
    responses = Ragged.of([[1, 2, 3], [], [2]], np.int32)
    assert decode(_of_words(), responses) == ["one two", "", "two"]


def test_a_byte_level_tokenizer_does_ask_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control to the test above."""
    monkeypatch.setattr(decoding, "_token_bytes", _never)
    with pytest.raises(AssertionError, match="asked"):
        decode(_of_bytes(), Ragged.of([[1]], np.int32))


@pytest.mark.parametrize("make", [_of_bytes, _of_words])
def test_no_rows_are_no_texts(make: Callable[[], Any]) -> None:
    assert decode(make(), Ragged.of([], np.int32)) == []
    assert decode(make(), Ragged.of([[], []], np.int32)) == ["", ""]


def test_a_batch_decodes_as_its_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens are left out, and an empty row is an empty text, in the tokenizer that a tiny model has."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    make_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [tokenizer("12 + 7 = 019.")["input_ids"] + [tokenizer.eos_token_id], [], [5], [tokenizer.pad_token_id]]
    texts = decode(tokenizer, Ragged.of(rows, np.int32))
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts[0] == "12 + 7 = 019."
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def _never(_: Any) -> None:
    raise AssertionError("the table was asked")
