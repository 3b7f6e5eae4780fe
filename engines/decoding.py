"""Response tokens to text, for rewards and records: whole batches at a time, on all cores of the rank.

vLLM leaves detokenisation out (it would do it token by token, between its steps).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Return the text of each row without special tokens, as the tokenizer's own `decode` does it row by row."""
    if not tokenizer.is_fast:
        return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    backend = tokenizer.backend_tokenizer
    with _in_parallel():
        texts: list[str] = backend.decode_batch(rows, skip_special_tokens=True)
    if tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE":
        return [tokenizer.clean_up_tokenization(text) for text in texts]
    return texts


@contextmanager
def _in_parallel() -> Iterator[None]:
    """Let the tokenizer use its threads, which are off elsewhere because processes are forked there."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
