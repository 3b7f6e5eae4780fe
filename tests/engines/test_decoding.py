"""Decoding a batch gives what the tokenizer gives row by row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.tokenizer import make_byte_tokenizer
from engines.decoding import decode


def test_a_batch_decodes_as_its_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens are left out, an empty row is an empty text, and no rows are no texts."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    make_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [tokenizer("12 + 7 = 019.")["input_ids"] + [tokenizer.eos_token_id], [], [5], [tokenizer.pad_token_id]]
    assert decode(tokenizer, rows) == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert decode(tokenizer, rows)[0] == "12 + 7 = 019."
    assert decode(tokenizer, []) == []
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
