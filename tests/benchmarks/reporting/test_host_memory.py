"""What a command holds is counted with all that it has started, and what they share counts once."""

from __future__ import annotations

import subprocess
import sys

from penstock.benchmarks.reporting.host_memory import held_bytes, run_measured

MIB = 1 << 20
# A process with 64 MiB of its own, which a child shares after the fork; the child then takes 64 MiB more.
FAMILY = """
import os, sys
shared = b"x" * (64 << 20)
told, tells = os.pipe()
if not os.fork():
    own = b"y" * (64 << 20)
    os.write(tells, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(told, 1)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


def test_a_family_is_counted_and_what_it_shares_counts_once() -> None:
    """Control: counted for each of them it would be 192 MiB at least, and 64 for the parent alone."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as family:
        assert family.stdin is not None
        assert family.stdout is not None
        assert family.stdout.readline() == b"ready\n"
        held = held_bytes(family.pid)
        family.stdin.close()
    assert 128 * MIB < held < 190 * MIB
    assert held_bytes(family.pid) == 0  # it has ended


def test_a_command_ends_as_it_does_by_itself() -> None:
    assert [run_measured([sys.executable, "-c", f"raise SystemExit({code})"])[0] for code in (0, 3)] == [0, 3]
