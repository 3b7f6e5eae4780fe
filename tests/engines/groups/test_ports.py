"""A port that is bound seconds after it was found free is none that the kernel gives away meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.engines.groups import interface
from penstock.engines.groups.interface import LOOPBACK, free_port, listening_socket


def test_a_free_port_is_none_that_others_are_given() -> None:
    """Control: one that the kernel gives is."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    found = [free_port(LOOPBACK) for _ in range(50)]
    assert not [port for port in found if first <= port <= last]
    assert len(set(found)) > 40
    with socket.socket() as given:
        given.bind((LOOPBACK, 0))
        assert first <= given.getsockname()[1] <= last


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also all of them, where the kernel's own are left. Control: the port is given once it is free again."""
    port = free_port(LOOPBACK)
    given = tmp_path / "range"
    given.write_text(f"{port + 1}\t65535\n", encoding="ascii")
    monkeypatch.setattr(interface, "_GIVEN_TO_ANY", given)
    monkeypatch.setattr(interface, "_LOWEST_PORT", port)
    assert free_port(LOOPBACK) == port
    with listening_socket(LOOPBACK, port):
        assert free_port(LOOPBACK) not in (0, port)
    assert free_port(LOOPBACK) == port
