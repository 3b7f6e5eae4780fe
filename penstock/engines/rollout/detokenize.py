"""Response tokens to text, for rewards and records: whole batches at a time.

vLLM leaves detokenisation out (it would do it token by token, between its steps). The tokenizers of Qwen, Llama 3 and
most others since write a text's UTF-8 bytes one after the other; for them a batch is one gather from a table of the
tokens' bytes: 26 ms for half a million tokens, where the tokenizers' own loop takes a second on two cores. Others
decode with theirs, on all cores of the rank.

Suffixes: `_T` tokens of all rows, `_B1` offsets (rows + 1), `_V` the vocabulary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import decoders, pre_tokenizers

from penstock.base.ragged import Ragged


def decode(tokenizer: Any, responses: Ragged) -> list[str]:
    """Return the text of each row without special tokens, as the tokenizer's own `decode` does it row by row."""
    if not tokenizer.is_fast:
        return [tokenizer.decode(row, skip_special_tokens=True) for row in _rows(responses)]
    backend = tokenizer.backend_tokenizer
    if type(backend.model).__name__ == "BPE" and isinstance(backend.decoder, decoders.ByteLevel):
        return _joined(_token_bytes(tokenizer), responses)
    with _in_parallel():
        texts: list[str] = backend.decode_batch(_rows(responses), skip_special_tokens=True)
    if tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE":
        return [tokenizer.clean_up_tokenization(text) for text in texts]
    return texts


def _rows(responses: Ragged) -> list[list[int]]:
    return [responses.row(index).tolist() for index in range(len(responses))]


def _joined(bytes_V: pa.LargeBinaryArray, responses: Ragged) -> list[str]:
    """Join the tokens' bytes row by row. What is no UTF-8, as half a character, becomes U+FFFD, as in the tokenizer."""
    known_T = np.minimum(responses.values_T, len(bytes_V) - 1)  # the last entry is empty: of ids that no token has
    joined = bytes_V.take(pa.array(known_T))
    _, offsets, data = joined.buffers()
    if data is None:
        return [""] * len(responses)
    begins_B1 = np.frombuffer(offsets, np.int64)[responses.offsets_B1].tolist()
    text = memoryview(data)
    return [str(text[begin:end], "utf-8", "replace") for begin, end in zip(begins_B1[:-1], begins_B1[1:], strict=True)]


@functools.cache
def _token_bytes(tokenizer: Any) -> pa.LargeBinaryArray:
    """Return the bytes that each token adds to a text, none for special ones, and one empty entry behind them all.

    A byte-level vocabulary writes each byte as one character: itself where that is printable Latin-1, and the others,
    in their order, as characters from U+0100 on. A token with any other character stands for itself.
    """
    backend = tokenizer.backend_tokenizer
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet} & set(range(256))
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {0x100 + place: byte for place, byte in enumerate(others)}
    texts = {index: token for token, index in backend.get_vocab(with_added_tokens=False).items()}
    added = backend.get_added_tokens_decoder()
    texts |= {index: "" if token.special else token.content for index, token in added.items()}
    bytes_V = [b""] * (max(texts) + 2)
    for index, token in texts.items():
        plain = alphabet.issuperset(token)
        bytes_V[index] = token.translate(byte_of).encode("latin-1") if plain else token.encode()
    return pa.array(bytes_V, pa.large_binary())


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
