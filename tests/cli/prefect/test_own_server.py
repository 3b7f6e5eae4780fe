"""The Prefect server that `penstock server` starts: failed statements leave nothing behind, events are not lost."""

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

from penstock.cli.prefect import own_server
from penstock.cli.prefect.own_server import RETRIES, execute, patient

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


def test_an_event_outlives_a_database_that_is_busy_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's own queue, and a handler that fails five times. Control: as it is the event is lost."""
    from prefect.server.utilities.messaging import memory

    monkeypatch.setattr(own_server, "FIRST_WAIT_S", 0.001)
    assert handled_after(5, tmp_path / "as it is") == (4, True)
    monkeypatch.setattr(memory.Subscription, "retry", patient(memory.Subscription.retry))
    assert handled_after(5, tmp_path / "changed") == (6, False)
    assert handled_after(100, tmp_path / "poisoned") == (RETRIES + 1, True)


def handled_after(failures: int, dead: Path) -> tuple[int, bool]:
    """Return how often an event is handled if that fails some times at first, and whether it was given up."""
    from prefect.server.utilities.messaging import memory

    tries = 0

    async def handle(_: Any) -> None:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise OSError("database is locked")

    async def consume() -> None:
        topic = memory.Topic("busy")
        subscription = memory.Subscription(topic, dead_letter_queue_path=dead)
        await subscription.deliver(memory.MemoryMessage(data=b"{}", attributes={}))
        while subscription._queue.qsize() or subscription._retry.qsize():
            message = await subscription.get()
            try:
                await handle(message)
            except OSError:
                await subscription.retry(message)

    asyncio.run(consume())
    return tries, dead.is_dir() and any(dead.iterdir())
