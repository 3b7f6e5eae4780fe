"""The Prefect server that `penstock server` starts: a failed statement leaves nothing to the garbage collector."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from penstock.cli.prefect.own_server import execute

TWICE = "INSERT INTO once VALUES (1)"


def open_after_failing(path: Path) -> bool:
    """Whether a cursor stays open whose statement failed, on an engine as Prefect's server has it."""
    cursors: list[sqlite3.Cursor] = []

    class Remembered(sqlite3.Cursor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            cursors.append(self)

    class Connection(sqlite3.Connection):
        def cursor(self, *_: Any) -> Any:
            return super().cursor(Remembered)

    async def fail() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"factory": Connection})
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE once (number INTEGER PRIMARY KEY)"))
            await connection.execute(text(TWICE))
            with pytest.raises(IntegrityError):
                await connection.execute(text(TWICE))
            failed, *_ = reversed(cursors)
            assert await connection.scalar(text("SELECT count(*) FROM once")) == 1
            still_open.append(_is_open(failed))
        await engine.dispose()

    still_open: list[bool] = []
    asyncio.run(fail())
    return still_open[0]


def _is_open(cursor: sqlite3.Cursor) -> bool:
    try:
        cursor.fetchone()
    except sqlite3.ProgrammingError as error:
        return "closed cursor" not in str(error)
    return True


def test_a_failed_statement_closes_its_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the change it stays open, and the garbage collector finds it on whatever thread it runs."""
    assert open_after_failing(tmp_path / "as it is")
    monkeypatch.setattr(aiosqlite.Cursor, "_execute", execute)
    assert not open_after_failing(tmp_path / "changed")
