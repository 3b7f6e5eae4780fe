"""Prefect's temporary server, which it starts where none is configured: it outlives Ctrl-C, and not its command.

A terminal sends Ctrl-C to all processes of its foreground group. A server that ends with the flow leaves the flow
nobody to tell that it was cancelled: it asks again for more than a minute, and fails with a connection error. Left
out: a command killed with SIGKILL, whose server stays.
"""

from __future__ import annotations

import signal


def start_server() -> None:
    """Have Prefect start its temporary server now, if it needs one; Ctrl-C meanwhile takes effect on return.

    A signal that is blocked when a process starts stays blocked in it. SIGTERM becomes an orderly exit with code 143,
    since Prefect ends its server in an exit handler, and the default runs none.
    """
    from prefect.client.orchestration import get_client

    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with get_client(sync_client=True) as client:
            client.api_healthcheck()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
