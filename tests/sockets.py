"""Which sockets a tree of processes listens on, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil


def doors(root: psutil.Process) -> Iterator[tuple[str, int, str]]:
    """Yield (address, port, command) of every TCP socket that listens and every UDP socket with an address, in a tree.

    A UDP socket that speaks to one peer alone is no door.
    """
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                listens = one.status == psutil.CONN_LISTEN if one.type == socket.SOCK_STREAM else not one.raddr
                if listens and one.laddr:
                    yield one.laddr.ip, one.laddr.port, " ".join(process.cmdline())[:200]


def strangers_reach(root: psutil.Process) -> list[tuple[str, int, str]]:
    """Return those of `doors` that other machines reach: all that are not on the loopback interface."""
    return [door for door in doors(root) if not ipaddress.ip_address(door[0]).is_loopback]
