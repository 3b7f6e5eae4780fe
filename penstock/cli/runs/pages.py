"""Serves the pages of past runs: the trackers', and Prefect's on its own database. Loopback only."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.base.interrupts import interrupts_deferred
from penstock.cli.prefect.server import password_settings
from penstock.trackers.table import keeps, pages_in, port_of_pages


def serve_pages(folder: Path, tracker_port: int, prefect_port: int, console: Console) -> None:
    """Start all servers and wait until Ctrl-C, SIGTERM or the end of one of them; neither outlives this call.

    Raises:
        UserError: there are no runs in `folder`, a port is taken, or a server ended by itself.
    """
    check_port(tracker_port, "--tracker-port")
    check_port(prefect_port, "--prefect-port")
    if not (runs := pages_in(folder, tracker_port)):
        raise UserError(
            f"{folder} holds no runs of a tracker that has pages", "name the directory that holds the run folders"
        )
    for port in runs.keys() - {tracker_port}:
        check_port(port, "--tracker-port, the one before it")
    flows = f"http://127.0.0.1:{prefect_port}"
    prefect = ["penstock.cli.prefect.own_server", "127.0.0.1", str(prefect_port)]
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or secrets.token_urlsafe(12)
    about_prefect = password_settings(password)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits an ignored SIGINT
        signal.signal(number, _interrupt)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with interrupts_deferred():  # or one that has started and is not in the list yet would stay
            for pages in runs.values():
                servers[pages.label] = _start(pages.module, pages.environment)
            servers["Prefect"] = _start(prefect, about_prefect)
        lines = [f"{pages.label:<7}  {pages.address}" for pages in runs.values()]
        lines += [f"Prefect  {flows}   password {password}"]  # its pages can change a running training
        console.print("\n".join([*lines, "Ctrl-C ends them."]), highlight=False, soft_wrap=True)
        wait_for(servers)
    except KeyboardInterrupt:
        console.print("ending")
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(timeout=30)


def check_port(port: int, option: str, host: str = "127.0.0.1") -> None:
    """Refuse a port on which this process cannot listen.

    Raises:
        UserError: names the option for another.
    """
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        said = f"port {port} cannot be used on {host}: {error.strerror}"
        raise UserError(said, f"name another with {option}") from error


def wait_for(servers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until one of the servers, which nobody told to end, has ended.

    Raises:
        UserError: says which.
    """
    while True:
        for name, server in servers.items():
            if server.poll() is not None:
                raise UserError(f"{name}'s server ended with code {server.returncode}", "its own messages are above")
        time.sleep(0.5)


def pages_of_run(summary: Mapping[str, Any], ui: str) -> dict[str, str]:
    """Return where trackers and Prefect show a run: on the servers of the environment, else once `ui` has started them.

    Args:
        summary: the run's.
        ui: the command that serves the pages.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL

    server = PREFECT_UI_URL.value() or (PREFECT_API_URL.value() or "").removesuffix("/api")
    prefect = public_address(server.rstrip("/")) if server else f"{ui}   then http://127.0.0.1:4200"
    flow_run = summary.get("prefect_flow_run_id")
    in_prefect = {"Prefect": f"{prefect}/runs/flow-run/{flow_run}"} if flow_run else {}
    tracked = summary["tracked"] or []
    return (
        _in_trackers([tracked] if isinstance(tracked, dict) else tracked, ui) | in_prefect
    )  # of a run before: the one


def _in_trackers(tracked: Sequence[Mapping[str, str]], ui: str) -> dict[str, str]:
    kept = (item for item in tracked if keeps(item["tracker"]))
    return {item["label"]: f"{_shown(item, ui)}   run {item['run']}" for item in kept}


def _shown(tracked: Mapping[str, str], ui: str) -> str:
    port, address = port_of_pages(tracked["tracker"]), tracked["address"]
    return address if port is None or address.startswith("http") else f"{ui}   then http://127.0.0.1:{port}"


def _start(module: list[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        env=dict(os.environ) | dict(settings),
        stdout=subprocess.DEVNULL,
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
