"""The listing of sockets, on which the tests of what a training opens rest, sees what it should."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.sockets import Door, doors, open_to_others

OPENING = """
import socket, sys
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        one = socket.socket(family, kind)
        one.bind((address, 0))
        if kind == socket.SOCK_STREAM:
            one.listen()
        globals()[f"{family} {kind} {address}"] = one
print("open", flush=True)
sys.stdin.read()
"""


def test_every_socket_that_others_reach_is_seen() -> None:
    """TCP and UDP, IPv4 and IPv6, of a child; those on the loopback interface are none of them."""
    command = [sys.executable, "-c", OPENING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        found = [door for door in doors(psutil.Process()) if "socket.SOCK_DGRAM" in door.command]
        child.stdin.close()
    assert sorted(door.address for door in found) == ["0.0.0.0", "0.0.0.0", "127.0.0.1", "127.0.0.1", "::", "::"]
    assert sorted(door.address for door in open_to_others(found)) == ["0.0.0.0", "0.0.0.0", "::", "::"]
    assert not open_to_others([Door("::1", 1, ""), Door("127.0.0.2", 1, "")])
