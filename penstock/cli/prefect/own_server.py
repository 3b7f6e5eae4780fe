"""Prefect's server on SQLite, without a standstill of a minute now and then.

    python -m penstock.cli.prefect.own_server 127.0.0.1 4200

The temporary server of a command is the same (`temporary_server.py`).

A statement that fails, as those do that mark deployments ready each time a worker asks for runs, leaves its cursor to
the garbage collector: SQLAlchemy 2.0 closes cursors of statements that succeed alone. The collector may find it on the
server's one thread while the connection waits for another one's write. Then that thread waits for this one, the write
that it waits for needs the thread to go on, and both stand still until SQLite gives up after 60 s; so does every
training that opens a child flow. Here a cursor is closed where its statement failed.

An event that cannot be handled because the database is busy is handled again, four times within milliseconds, and then
by nobody: an automation does not see it. Here the server waits a little longer before each time, seconds in all.

Left out: databases other than SQLite, which have no such cursors; SQLAlchemy 2.1, which closes them and with which no
schedule fires; everything else about the server, which is Prefect's.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiosqlite

EVERY_ADDRESS = ("0.0.0.0", "::")
RETRIES, FIRST_WAIT_S = 6, 0.1  # of an event: 6 s in all


async def execute(cursor: Any, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a function of a cursor on its connection's thread, as `aiosqlite.Cursor` does; close it if that fails."""

    def run() -> Any:
        try:
            return function(*arguments, **named)
        except sqlite3.Error:
            cursor._cursor.close()
            raise

    return await cursor._conn._execute(run)


def patient(retry: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
    """Return `Subscription.retry` of Prefect with a wait before it, twice as long each time, and more tries."""

    async def retry_later(subscription: Any, message: Any) -> None:
        subscription.max_retries = RETRIES
        await asyncio.sleep(FIRST_WAIT_S * 2**message.retry_count)
        await retry(subscription, message)

    return retry_later


def mend() -> None:
    """Change this process so that a server of Prefect that it becomes has neither fault."""
    from prefect.server.utilities.messaging import memory

    aiosqlite.Cursor._execute = execute  # type: ignore[assignment]
    memory.Subscription.retry = patient(memory.Subscription.retry)  # type: ignore[method-assign, assignment]


def serve(host: str, port: int) -> None:
    """Start the server and stay with it until it ends, which ends this process.

    Args:
        host: the address that it listens on.
    """
    if host not in EVERY_ADDRESS:  # else its page asks port 4200 for its data, whatever port it is served from
        os.environ.setdefault("PREFECT_UI_API_URL", f"http://{host}:{port}/api")

    from prefect.cli import app  # reads its settings when it is imported

    mend()
    sys.argv[1:] = ["server", "start", "--host", host, "--port", str(port)]
    app()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
