"""Which sockets a tree of processes listens on, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil


class Door(NamedTuple):
    """A TCP socket that listens, or a UDP socket with an address of its own."""

    address: str
    port: int
    command: str


def doors(root: psutil.Process) -> Iterator[Door]:
    """Yield those of a process and all below it. A UDP socket that speaks to one peer alone is none."""
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for one in process.net_connections("inet"):
                listens = one.status == psutil.CONN_LISTEN if one.type == socket.SOCK_STREAM else not one.raddr
                if listens and one.laddr:
                    yield Door(one.laddr.ip, one.laddr.port, " ".join(process.cmdline()))


def open_to_others(found: Iterable[Door]) -> list[Door]:
    """Return those that other machines reach: all that are not on the loopback interface."""
    return [door for door in found if not ipaddress.ip_address(door.address).is_loopback]


@contextmanager
def noted_doors(found: set[Door]) -> Iterator[None]:
    """Add the `doors` of this process and all below it to `found`, once a second while the block lasts."""
    over = threading.Event()

    def note() -> None:
        while not over.wait(1.0):
            found.update(doors(psutil.Process()))

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
