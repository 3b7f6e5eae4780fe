"""Machines of a test: network namespaces with a name and an address each, on a network that the test makes and removes.

They share this machine's disk and processors, and nothing else that a training uses: neither loopback interface nor
ports. Needs the rights to make network namespaces, which CI has.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_NUMBERS = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Machine:
    """A machine: its name, its address, and how it is reached."""

    name: str
    address: str
    namespace: str
    cable: str  # the end that is on this machine

    def command(self, words: Sequence[str]) -> list[str]:
        """Return what runs a command there, under the machine's own name."""
        named = f'hostname {self.name}; exec "$0" "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, *words]

    def start(
        self, words: Sequence[str], environment: dict[str, str], log: Path, folder: Path = ROOT
    ) -> subprocess.Popen[bytes]:
        """Start a command there, in a folder."""
        with log.open("ab") as stream:
            return subprocess.Popen(
                self.command(words), env=environment, stdout=stream, stderr=stream, cwd=folder, start_new_session=True
            )

    def cut_off(self) -> None:
        """Pull the cable."""
        ip("link", "set", self.cable, "down")

    def connect(self) -> None:
        """Put it back."""
        ip("link", "set", self.cable, "up")

    def processes(self, word: str | None = None) -> list[psutil.Process]:
        """Return the processes there, or those whose command line has a word."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True
        ).stdout.split()
        found = []
        for pid in map(int, listed):
            try:
                process = psutil.Process(pid)
                if word in (None, *process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


@contextmanager
def network(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """Make a network of machines; yield the address of this one on it, and the others."""
    number = next(_NUMBERS)  # a process has several networks at the same time
    tag = f"{os.getpid() % 10_000}-{number}"
    subnet = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + 50 * number) % 250}"
    with ExitStack() as stack:
        bridge = f"br{tag}"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        machines = []
        for node in range(count):
            name, address = f"node-{node}", f"{subnet}.{node + 2}"
            machine = Machine(name, address, f"ns{tag}-{node}", f"ve{tag}-{node}")
            ip("netns", "add", machine.namespace)
            stack.callback(ip, "netns", "del", machine.namespace)
            ip("link", "add", machine.cable, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("link", "set", machine.cable, "master", bridge)
            ip("link", "set", machine.cable, "up")
            for inside in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip("-n", machine.namespace, *inside.split())
            machines.append(machine)
        yield f"{subnet}.1", machines


PREFECT = [sys.executable, "-m", "prefect"]
