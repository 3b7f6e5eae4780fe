"""What versions of libraries need is done before anything depends on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines.rollout import vllm as versions

SETTLED_FIRST = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.rollout import vllm as versions
from engines.ranks.worker import Worker

class Calls(TorchDispatchMode):
    seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if name in versions.VECTOR_FUNCTIONS:
            self.seen.append((name, args[0].dtype, args[0].numel()))
        return function(*args, **(kwargs or {}))

class Stop(Exception):
    pass

def stop():
    raise Stop

versions.prepare_deepspeed_for_cpu = stop
with Calls() as calls:
    try:
        if CONTROL:
            torch.cos(torch.zeros(10_000))
        Worker(0, 1, None)
    except Stop:
        pass
wanted = {(name, dtype) for name in versions.VECTOR_FUNCTIONS for dtype in (torch.float32, torch.float64)}
first = {}
for name, dtype, count in calls.seen:
    first.setdefault((name, dtype), count)
print(first.keys() == wanted and set(first.values()) == {1})
"""


@pytest.mark.parametrize(("control", "settled"), [(False, True), (True, False)])
def test_a_ranks_first_call_of_each_vector_function_has_one_element(control: bool, settled: bool) -> None:
    """In a new process, before the rank has built anything. Control: a call of two threads that comes earlier shows.

    The race itself strikes one process in sixty: no test of minutes would see it.
    """
    script = SETTLED_FIRST.replace("CONTROL", str(control))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split()[-1] == str(settled)


@pytest.mark.parametrize(("known", "asked"), [(True, 0), (False, 1)])
def test_vllm_starts_no_process_to_look_at_the_engines_model(
    known: bool, asked: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine whose cache is empty. Control: an architecture that nobody prepared for does start one."""
    from vllm.model_executor.models import registry

    started: list[object] = []
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", started.append)
    monkeypatch.setattr(registry.ModelRegistry, "models", dict(registry.ModelRegistry.models))
    if known:
        versions.inspect_in_this_process(["Olmo2ForCausalLM", "NobodysForCausalLM"])
    registry.ModelRegistry._try_inspect_model_cls("Olmo2ForCausalLM")
    assert len(started) == asked
    assert "NobodysForCausalLM" not in registry.ModelRegistry.models
