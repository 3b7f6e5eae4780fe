"""A response token by token: each piece of its text with the advantage of the tokens that it is made of.

Bytes of one character may be spread over tokens; those are one piece then, with their mean. Special tokens are shown as
they are called, since the end of a response is learnt like any other token.

Left out: colours (terminal.py, page.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.configs.tree.recipes import read_mapping
from penstock.reports.samples.reading import Response
from penstock.state.run_folder import RunFolder

LEVELS = 4  # of shade, on either side of 0
HEAD, TAIL = 2, 1  # parts of a long response that are kept of its beginning and of its end


@dataclass(frozen=True)
class Piece:
    """Text of neighbouring tokens, with the lowest and the highest advantage among them; None: nothing is learnt here.

    Attributes:
        left_out: how many tokens are not shown here; the text is empty then.
    """

    text: str
    low: float | None
    high: float | None
    left_out: int = 0

    def level(self, scale: float) -> int:
        """The shade, from -4 to 4, by the mean of the piece's ends; `scale` has the strongest one."""
        if self.low is None or self.high is None or not scale:
            return 0
        share = (self.low + self.high) / 2 / scale
        shade = min(LEVELS, math.ceil(abs(share) * LEVELS - 1e-9))
        return shade if share > 0 else -shade


def load_tokenizer(run: RunFolder) -> Any | None:
    """Return the tokenizer of a run, from the first folder that has one; None if none has: its model is gone."""
    model = read_mapping(run.config).get("model", {})
    started_from = model.get("path")
    folders = [run.model("initial"), *([Path(started_from)] if started_from else []), run.model("final")]
    if (folder := next((place for place in folders if (place / "tokenizer.json").is_file()), None)) is not None:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json"))  # without transformers, whose import takes seconds
    folder = next((place for place in folders if (place / "tokenizer_config.json").is_file()), None)
    if folder is None or model.get("code"):  # a tokenizer of the model's own code cannot be shown token by token
        return None
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return loaded.backend_tokenizer if loaded.is_fast else None


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of an episode that are all the policy's own, or all what it was told.

    Attributes:
        path: the number of the path that begins after these tokens, which are its prompt then.
    """

    own: bool
    tokens: int
    text: str
    path: int | None = None


def segments(tokenizer: Any, response: Response) -> list[Segment]:
    """Return an episode's turns and what is between them, control tokens included; of several paths one by one."""
    first, *others = response.paths
    found = _segments(tokenizer, first)
    for number, (prompt, path) in enumerate(zip(response.path_prompts, others, strict=True), 2):
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        found += [Segment(False, len(prompt), text, number), *_segments(tokenizer, path)]
    return found


def _segments(tokenizer: Any, response: Response) -> list[Segment]:
    assert response.tokens is not None
    mask_T = np.ones(len(response.tokens), np.uint8) if response.mask is None else response.mask
    cuts = [0, *(np.flatnonzero(np.diff(mask_T)) + 1).tolist(), len(mask_T)]
    parts = [(first, end) for first, end in pairwise(cuts) if first < end]
    texts = [tokenizer.decode(response.tokens[first:end], skip_special_tokens=False) for first, end in parts]
    return [Segment(bool(mask_T[first]), end - first, text) for (first, end), text in zip(parts, texts, strict=True)]


def pieces(tokenizer: Any, response: Response, most: int | None = None) -> list[Piece]:
    """Return a response's text in pieces of as few tokens as there are.

    Args:
        most: tokens to show; of a longer response its beginning and its end, with a gap that says how many are missing.
    """
    assert response.tokens is not None
    tokens_T = response.tokens
    values_T = np.zeros(len(tokens_T)) if response.advantages is None else response.advantages
    counted_T = np.ones(len(tokens_T), bool) if response.mask is None else response.mask > 0
    if most is None or len(tokens_T) <= most:
        return _pieces(tokenizer, tokens_T, values_T, counted_T)
    head = most * HEAD // (HEAD + TAIL)
    begin, end = slice(0, head), slice(len(tokens_T) - (most - head), None)
    first, last = (_pieces(tokenizer, tokens_T[part], values_T[part], counted_T[part]) for part in (begin, end))
    return [*first, Piece("", None, None, left_out=len(tokens_T) - most), *last]


def _pieces(tokenizer: Any, tokens_T: np.ndarray, values_T: np.ndarray, counted_T: np.ndarray) -> list[Piece]:
    from tokenizers.decoders import DecodeStream

    stream, found, begin = DecodeStream(skip_special_tokens=False), list[Piece](), 0
    for place, token in enumerate(tokens_T.tolist()):
        if (text := stream.step(tokenizer, token)) is None:
            continue  # half a character
        found.append(_piece(text, values_T[begin : place + 1], counted_T[begin : place + 1]))
        begin = place + 1
    if begin < len(tokens_T):  # cut in the middle of a character
        found.append(_piece("\N{REPLACEMENT CHARACTER}", values_T[begin:], counted_T[begin:]))
    return found


def _piece(text: str, values_T: np.ndarray, counted_T: np.ndarray) -> Piece:
    if not counted_T.any():
        return Piece(text, None, None)
    mean = float(values_T[0] if len(values_T) == 1 else values_T[counted_T].mean())
    return Piece(text, mean, mean)


def joined(found: Iterable[Piece], alike: Callable[[Piece], Any]) -> list[Piece]:
    """Join neighbours that are alike: what looks the same need not be told apart."""
    groups = groupby(found, lambda piece: (piece.low is None, piece.left_out, alike(piece)))
    return [_join(list(group)) for _, group in groups]


def _join(group: Sequence[Piece]) -> Piece:
    lows = [piece.low for piece in group if piece.low is not None]
    highs = [piece.high for piece in group if piece.high is not None]
    text = "".join(piece.text for piece in group)
    return Piece(text, min(lows, default=None), max(highs, default=None), group[0].left_out)


def scale_of(responses: Iterable[Response]) -> float:
    """Return the largest size of an advantage among the tokens that count, 0 if there are none."""
    counted = (response.counted_advantages for response in responses)
    return max((float(np.abs(values).max()) for values in counted if values is not None and values.size), default=0.0)
