"""Which GPUs the trainings of a sweep get: each its own, as many as it needs, and no more trainings than fit."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session.sweeps import lanes as module
from penstock.session.sweeps.lanes import GPUS, Lane, lanes_for, seen


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that this machine shows so many GPUs."""

    def show(count: int) -> None:
        monkeypatch.setattr(module, "visible_gpus", lambda: list(range(count)))
        monkeypatch.setattr(module, "gpu_uuid", lambda index: f"GPU-{index}")

    return show


def config(*groups: list[int] | int | None) -> TrainConfig:
    """Return a training whose engine groups are on these GPUs, or on so many."""
    roles = [["actor", "rollout"], ["critic"]] if len(groups) > 1 else [["actor", "rollout"]]
    keys = ["ranks" if isinstance(gpus, int) else "gpus" for gpus in groups]
    placed = {f"g{n}": {keys[n]: gpus, "roles": roles[n]} for n, gpus in enumerate(groups)}
    algorithm = {"algorithm": {"name": "ppo"}} if len(groups) > 1 else {}
    model = {"hidden_size": 96, "layers": 1, "heads": 3, "kv_heads": 3, "intermediate_size": 96, "max_positions": 64}
    return config_from_mapping({"model": {"tiny": model}, "groups": placed, **algorithm}, "test")


def shown(found: list[Lane]) -> list[str]:
    """Return what each lane shows of the GPUs."""
    return [dict(lane.environment)[GPUS] for lane in found]


def test_trainings_that_name_their_gpus_share_the_machine(gpus: Callable[[int], None]) -> None:
    """Of seven GPUs two sets of three. Control: fewer trainings than would fit, or fewer asked for."""
    gpus(7)
    training = config([0, 1], [2])
    assert shown(lanes_for([training] * 5, None)) == ["GPU-0,GPU-1,GPU-2", "GPU-3,GPU-4,GPU-5"]
    assert shown(lanes_for([training], None)) == ["GPU-0,GPU-1,GPU-2"]
    for counted in (config(2, 1), config(2, [0])):  # the second sees GPU 0 and two others
        assert lanes_for([counted] * 5, None) == lanes_for([training] * 5, None)
    assert shown(lanes_for([training] * 5, 1)) == ["GPU-0,GPU-1,GPU-2"]
    with pytest.raises(UserError, match="--at-once 3: a training takes 3 GPUs, and 7 are visible"):
        lanes_for([training] * 5, 3)


def test_trainings_that_take_all_gpus_are_one_at_a_time_or_share_them(gpus: Callable[[int], None]) -> None:
    """Evenly, where several at a time are asked for. Control: more than there are GPUs do not fit."""
    gpus(4)
    training = config()
    assert shown(lanes_for([training] * 3, None)) == ["GPU-0,GPU-1,GPU-2,GPU-3"]
    assert shown(lanes_for([training] * 3, 2)) == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    with pytest.raises(UserError, match="--at-once 5"):
        lanes_for([training] * 9, 5)


def test_the_largest_training_decides(gpus: Callable[[int], None]) -> None:
    """A sweep may vary the groups. Control: the smaller one alone."""
    gpus(4)
    small, large = config([0]), config([0, 1])
    assert shown(lanes_for([small, large, small], None)) == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert len(lanes_for([small] * 9, None)) == 4


def test_on_a_cpu_trainings_take_turns_unless_asked(gpus: Callable[[int], None]) -> None:
    """One alone has the environment of any training; several share the cores."""
    gpus(0)
    assert lanes_for([config()] * 3, None) == [Lane(0)]
    several = lanes_for([config()] * 3, 2)
    cores = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [dict(lane.environment)["OMP_NUM_THREADS"] for lane in several] == [cores, cores]


def test_a_check_sees_what_a_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards this process sees what it saw, also if that was nothing special."""
    lane = Lane(0, ((GPUS, "GPU-3"),))
    monkeypatch.setenv(GPUS, "0,1")
    with seen(lane):
        assert os.environ[GPUS] == "GPU-3"
    assert os.environ[GPUS] == "0,1"
    monkeypatch.delenv(GPUS)
    with seen(lane):
        assert os.environ[GPUS] == "GPU-3"
    assert GPUS not in os.environ
