"""Prefect's temporary server, which it starts where none is configured: it outlives the flow, and not its command.

Signals often go to all processes of a group: a terminal sends Ctrl-C like that, `timeout` its SIGTERM. A server that
ends with the flow leaves the flow nobody to tell that it was cancelled: it asks again for minutes, and fails with a
connection error. So the server has a session of its own. A command that is killed with SIGKILL runs nothing more, so a
shell beside it, which is there as soon as the server's process is, waits for that and ends the server; another shell
takes the place of one that is killed. A server that ends before its command, killed by whatever it is, is started again
with the same settings: the port is this process's own meanwhile, so nobody is refused, and who asks waits for seconds.
It is started by a module of ours (`temporary_server.py`), since as it is it stands still for a minute now and then.
Every user of the machine reaches its port, so it asks for a password that this process and the server alone know.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from penstock.base.errors import UserError
from penstock.reports.progress import waiting

START_SERVER = "start one with 'penstock server', or set PREFECT_API_URL to yours"
RESTARTS = 5  # of a server that ends; one that cannot live is not started for ever
UVICORN = ["-m", "uvicorn"]
MENDED = ["-m", "penstock.cli.prefect.temporary_server"]
_log = logging.getLogger(__name__)
SHELL_LOOK_S = 0.5
_Usual = subprocess.Popen[Any]


def check_server(default: str | None = None) -> None:
    """Ask the configured Prefect server, or else that at `default`, for a sign of life.

    Without either nobody is asked, and the temporary server that this process may start will have its password.

    Raises:
        UserError: it does not answer; names no password of its address.
    """
    from httpx import HTTPStatusError
    from prefect.client.base import ServerType
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if (url := configured or default) is None:
        keep_others_out()
        return
    # Prefect's own client, which knows keys and certificates
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        if isinstance(error, HTTPStatusError) and client.server_type == ServerType.CLOUD:
            return  # it answers, and has nothing to say of its health to a workspace
    if error is not None:
        said = f"no Prefect server answers at {url}{' (PREFECT_API_URL)' if configured else ''}: {error}"
        raise UserError(re.sub(r"//[^/\s]*@", "//", said), START_SERVER) from error


@functools.cache
def keep_others_out() -> None:
    """Give Prefect's temporary server, if this process is to start one, a password that is made anew.

    Server and clients find it in their environment, which other users cannot read. Whoever names a server has a say in
    who may use that.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value() is not None:
        return
    os.environ |= password_settings(secrets.token_urlsafe())
    refresh_global_settings_context()


def password_settings(password: str) -> dict[str, str]:
    """Return what a Prefect server and its clients read in their environment, for a server that asks for `password`."""
    return {"PREFECT_SERVER_API_AUTH_STRING": password, "PREFECT_API_AUTH_STRING": password}


def start_server() -> None:
    """Have Prefect start its temporary server now, if it needs one; Ctrl-C meanwhile takes effect on return.

    SIGTERM becomes an orderly exit with code 143, since Prefect ends its server in an exit handler, and the default
    runs none.

    Whether a configured server answers is for `check_server` to say, before there is a run folder.

    Raises:
        UserError: Prefect's folder cannot be made.
    """
    from prefect.client.base import ServerType
    from prefect.client.orchestration import get_client

    _make_home()
    keep_others_out()
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The line's thread is started here: one that is older would take the Ctrl-C that this one has blocked.
        with (
            waiting(Console(), "starting Prefect's server"),
            _sessions_of_their_own(),
            get_client(sync_client=True) as client,
        ):
            if client.server_type == ServerType.EPHEMERAL:
                _keep_alive()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _make_home() -> None:
    """Make Prefect's folder: where only its parent is missing, its server would wait two minutes and then fail."""
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    try:
        home.mkdir(0o700, parents=True, exist_ok=True)  # as Prefect makes it: its records are nobody else's
    except OSError as error:
        raise UserError(
            f"PREFECT_HOME is {home}, and that folder cannot be made: {error.strerror}", "set it to another folder"
        ) from error


class _Apart(_Usual):
    """A process with a session of its own that ends when this process is gone, however it got away."""

    def __init__(self, args: Any, **options: Any) -> None:
        self.command = mended(args)
        self.options = options | {"start_new_session": True}
        super().__init__(self.command, **self.options)
        shell = end_with_this_process(self.pid)
        threading.Thread(target=_keep_shell, args=(self.pid, shell), name="prefect-server-shell", daemon=True).start()


def mended(command: list[str]) -> list[str]:
    """Return the command of Prefect's server with our module in uvicorn's place, and any other as it is."""
    return [command[0], *MENDED, *command[3:]] if command[1:3] == UVICORN else command


@contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """Keep processes that are started in this block, by whatever library, out of reach of signals to this group."""
    usual = subprocess.Popen
    subprocess.Popen = _Apart  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        subprocess.Popen = usual  # type: ignore[misc]


def _server() -> _Apart:
    from prefect.server.api.server import SubprocessASGIServer

    process = SubprocessASGIServer().server_process  # the one instance that get_client() has started
    assert isinstance(process, _Apart)
    return process


@functools.cache
def _keep_alive() -> None:
    """Start the server again whenever it ends before this process does."""
    leaving = threading.Event()
    atexit.register(leaving.set)  # before Prefect's own handler, which is older, ends the server
    threading.Thread(target=_start_again, args=(leaving,), name="prefect-server", daemon=True).start()


def _start_again(leaving: threading.Event) -> None:
    from prefect.server.api.server import SubprocessASGIServer

    server, first = SubprocessASGIServer(), _server()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for number in range(RESTARTS):
            with suppress(ChildProcessError):  # Prefect was faster: this process is leaving
                os.waitid(os.P_PID, _server().pid, os.WEXITED | os.WNOWAIT)  # leaves its end for Prefect to collect
            if leaving.is_set():
                return
            if not number:
                listener.bind(("127.0.0.1", server.port))
                listener.listen(128)
            _log.warning("Prefect's temporary server has ended: it is started again, and the flow goes on")
            command = [*first.command, "--fd", str(listener.fileno())]
            _server().wait()
            server.server_process = _Apart(command, **first.options | {"pass_fds": (listener.fileno(),)})


def _keep_shell(server: int, shell: subprocess.Popen[bytes]) -> None:
    """Keep a shell beside a server as long as that lives: its number may be another process's afterwards."""
    while _lives(server):
        try:
            shell.wait(SHELL_LOOK_S)
        except subprocess.TimeoutExpired:
            continue
        shell = end_with_this_process(server)
    shell.kill()
    shell.wait()


def _lives(child: int) -> bool:
    """Whether a child of this process runs; its end is left for others to collect."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:  # they have
        return False


def end_with_this_process(pid: int) -> subprocess.Popen[bytes]:
    """Start a shell that sends SIGTERM to `pid` when this process is gone: the kernel then closes the shell's input."""
    return _Usual(
        ["sh", "-c", 'read -r _; kill "$1"', "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the command
    )


class Terminated(SystemExit):
    """SIGTERM has come: an orderly exit, with the code that a shell gives it."""


def _leave(number: int, _: object) -> None:
    raise Terminated(128 + number)
