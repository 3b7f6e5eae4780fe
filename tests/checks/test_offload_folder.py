"""Folders for states in files are looked at before anything starts: they are there, on a disk, and have room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from penstock.base import nameless_files
from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.spec import RankDevice
from penstock.engines.training.trained_state import live_in_files

TINY: dict[str, Any] = {"tiny": {"max_positions": 2048}}
Disk = Callable[..., None]


def _trainer(folder: Path | str, offload: str = "optimizer") -> dict[str, Any]:
    return {"zero_stage": 3, "offload": offload, "offload_folder": str(folder)}


@pytest.fixture
def disk_of(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Let folders be on a disk of a type with so many bytes free."""

    def disk(free: int, system: str = "ext4") -> None:
        monkeypatch.setattr(nameless_files, "file_system_of", lambda folder: system)
        monkeypatch.setattr(memory.psutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    return disk


def test_a_folder_that_takes_no_states_is_refused_before_a_start(tmp_path: Path, disk_of: Disk) -> None:
    """By its name, of a training and of an offline one. Controls: one on a disk passes; without one all is well."""

    def check(folder: Path | str) -> None:
        memory.check_memory(TrainConfig.model_validate({"model": TINY, "actor": _trainer(folder)}))
        offline = {"model": TINY, "trainer": _trainer(folder)}
        memory.check_finetuning_memory(PreferenceConfig.model_validate(offline).engines(), "trainer")

    disk_of(1 << 40)
    check(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}/absent is no folder here"):
        check(tmp_path / "absent")
    with pytest.raises(UserError, match="files in offload_folder /proc cannot be made"):
        check("/proc")
    disk_of(1 << 40, "tmpfs")
    with pytest.raises(UserError, match=rf"{tmp_path} is in memory itself \(tmpfs\)"):
        check(tmp_path)
    memory.check_memory(TrainConfig.model_validate({"model": TINY}))


def test_a_rank_refuses_a_folder_in_memory_before_it_moves_anything(tmp_path: Path, disk_of: Disk) -> None:
    """As on a machine of a pool, where nothing was looked at before. Control: on a disk it goes on to the optimizer."""
    disk_of(1 << 40, "ramfs")
    with pytest.raises(UserError, match=rf"{tmp_path} is in memory itself \(ramfs\)"):
        live_in_files(nn.Linear(1, 1), object(), tmp_path)
    disk_of(1 << 40)
    with pytest.raises(AttributeError, match="grad_partitions_flat_buffer"):
        live_in_files(nn.Linear(1, 1), object(), tmp_path)


def test_all_folders_of_a_disk_have_room_there_together(tmp_path: Path, disk_of: Disk) -> None:
    """An actor's and a critic's files, counted by hand: AdamW's masters and moments, with weights where all is moved.

    Controls: a byte less is too little, unless other trainings are waited for; ranks elsewhere need none here.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    sections = {"actor": _trainer(first), "critic": _trainer(second, "all"), "algorithm": {"name": "ppo"}}
    config = TrainConfig.model_validate({"model": {**TINY, "dtype": "float32"}, **sections})
    (group,) = memory.estimate_groups(config)
    parameters = group.files[str(first)] // 12
    assert parameters > 50_000 and group.files == {str(first): 12 * parameters, str(second): 16 * parameters}

    disk_of(28 * parameters)
    memory.check_memory(config)
    told = memory.describe_offload(config, [group])
    assert [str(folder) in line for folder, line in zip((first, second), told, strict=True)] == [True, True]
    disk_of(28 * parameters - 1)
    with pytest.raises(memory.NoRoom, match=f"offload_folder {first} and {second}: states take"):
        memory.check_memory(config)
    memory.check_memory(config, memory.Elsewhere(others=frozenset({0})))
    memory.check_offload_folders([replace(group, devices=(RankDevice(0, "h200/0"),))])
