"""What a rank settles is done before anything depends on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETTLED_FIRST = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engines.training import start
from penstock.engines.ranks.worker import Worker

class Calls(TorchDispatchMode):
    seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if name in start.VECTOR_FUNCTIONS:
            self.seen.append((name, args[0].dtype, args[0].numel()))
        return function(*args, **(kwargs or {}))

class Stop(Exception):
    pass

def stop():
    raise Stop

start.prepare_deepspeed_for_cpu = stop
with Calls() as calls:
    try:
        if CONTROL:
            torch.cos(torch.zeros(10_000))
        Worker(0, 1, None)
    except Stop:
        pass
wanted = {(name, dtype) for name in start.VECTOR_FUNCTIONS for dtype in (torch.float32, torch.float64)}
first = {}
for name, dtype, count in calls.seen:
    first.setdefault((name, dtype), count)
print(first.keys() == wanted and set(first.values()) == {1})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("control", "settled"), [(False, True), (True, False)])
def test_a_ranks_first_call_of_each_vector_function_has_one_element(control: bool, settled: bool) -> None:
    """In a new process, before the rank has built anything. Control: a call of two threads that comes earlier shows.

    The race itself strikes one process in sixty: no test of minutes would see it.
    """
    script = SETTLED_FIRST.replace("CONTROL", str(control))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split()[-1] == str(settled)
