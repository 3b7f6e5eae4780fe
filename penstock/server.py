"""Prefect's temporary server, which it starts where none is configured: it outlives Ctrl-C, and not its command.

A terminal sends Ctrl-C to all processes of its foreground group. A server that ends with the flow leaves the flow
nobody to tell that it was cancelled: it asks again for more than a minute, and fails with a connection error. A command
that is killed with SIGKILL runs nothing more, so a shell beside it waits for that and ends the server. Left out: a
command killed in the seconds in which its server starts.
"""

from __future__ import annotations

import signal
import subprocess

_watching: list[subprocess.Popen[bytes]] = []  # a shell that lost its Popen object would see its standard input end


def start_server() -> None:
    """Have Prefect start its temporary server now, if it needs one; Ctrl-C meanwhile takes effect on return.

    A signal that is blocked when a process starts stays blocked in it. SIGTERM becomes an orderly exit with code 143,
    since Prefect ends its server in an exit handler, and the default runs none.
    """
    from prefect.client.base import ServerType
    from prefect.client.orchestration import get_client

    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with get_client(sync_client=True) as client:
            client.api_healthcheck()
            if client.server_type == ServerType.EPHEMERAL and not _watching:
                _watching.append(end_with_this_process(_server_pid()))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _server_pid() -> int:
    from prefect.server.api.server import SubprocessASGIServer

    process = SubprocessASGIServer().server_process  # the one instance that get_client() has started
    assert process is not None
    return process.pid


def end_with_this_process(pid: int) -> subprocess.Popen[bytes]:
    """Start a shell that sends SIGTERM to `pid` when this process is gone: the kernel then closes the shell's input."""
    return subprocess.Popen(
        ["sh", "-c", 'read -r _; kill "$1"', "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the command
    )


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
