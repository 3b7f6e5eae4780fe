"""The rows that a training starts with, each file read and hashed once, however many ask.

The checks, a dry run, the tokenizing and the note of what was tokenized look at the same rows. So what was checked is
what is trained on, also where a file is replaced while a start waits for GPUs. Nothing is kept outside of
`reading_once`, and nothing once the rows are tokenized (`forget`).

Left out: what a file may hold (penstock/data/rows.py) and what its columns mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from penstock.configs.schema import TrainConfig
from penstock.data.arithmetic import make_problems
from penstock.data.rows import read_content, rows_in
from penstock.data.squares import make_pictures

T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """What a file held when it was read.

    Attributes:
        rows: as of `penstock.data.rows.read_rows`; several look at them, so nobody changes them.
        digest: SHA-256 of the very bytes that the rows were made from.
    """

    rows: pd.DataFrame
    digest: str


_kept: dict[Hashable, Any] = {}  # by resolved path, or by the settings of made-up problems
_scopes = 0  # of `reading_once`, inside each other


@contextmanager
def reading_once() -> Iterator[None]:
    """Read each file once, at its first use, until the context ends or `forget` is called. Contexts may be nested."""
    global _scopes
    _scopes += 1
    try:
        yield
    finally:
        _scopes -= 1
        if not _scopes:
            forget()


def forget() -> None:
    """Give back the memory of all that was read: the rows are tokenized."""
    _kept.clear()


def rows_of(path: Path) -> pd.DataFrame:
    """Return the rows of a JSONL or Parquet file; row i of the frame is row i of the file.

    Raises:
        UserError: see `penstock.data.rows.read_rows`.
    """
    return _file(path).rows


def digest_of(path: Path) -> str:
    """Return the SHA-256 of the bytes that `rows_of` made the rows from.

    Raises:
        UserError: see `penstock.data.rows.read_rows`.
    """
    return _file(path).digest


def split_of(config: TrainConfig, split: str) -> pd.DataFrame:
    """Return the rows of "train", "heldout" or "sft": made-up problems, or those of the file that the key names.

    Raises:
        UserError: see `penstock.data.rows.read_rows`.
    """
    if (squares := config.data.squares) is not None:
        drawn = (squares.model_dump_json(), config.seed)
        return _once(drawn, lambda: make_pictures(squares, config.seed))[split]
    arithmetic = config.data.arithmetic
    if arithmetic is None:
        return rows_of(Path(str(getattr(config.data, split))))
    made_from = (arithmetic.model_dump_json(), config.seed)
    return _once(made_from, lambda: make_problems(arithmetic, config.seed))[split]


def _file(path: Path) -> DataFile:
    return _once(path.resolve(), lambda: _read(path))


def _read(path: Path) -> DataFile:
    content = read_content(path)
    return DataFile(rows_in(content, path), hashlib.sha256(content).hexdigest())


def _once(key: Hashable, make: Callable[[], T]) -> T:
    if not _scopes:
        return make()
    if key not in _kept:
        _kept[key] = make()
    found: T = _kept[key]
    return found
