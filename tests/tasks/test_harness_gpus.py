"""Tasks of lm-evaluation-harness run on GPUs that no training has, and keep them while they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.session.machines import claims
from penstock.tasks.evaluation import harness


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str | None, int]]]:
    """What the harness sees of this machine's GPUs 5 and 7, and how many files it keeps open; nothing is run."""
    found: list[tuple[str | None, int]] = []

    def run(_: Sequence[str], environment: Mapping[str, str], __: Path, kept: Sequence[int]) -> None:
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as these numbers count
        found.append((environment.get("CUDA_VISIBLE_DEVICES"), len(kept)))

    def nothing(*_: Any) -> list[Any]:
        return []

    monkeypatch.setenv(claims.FOLDER, str(tmp_path / "claims"))
    monkeypatch.setattr(claims, "gpu_uuid", lambda index: f"GPU-{index}")
    for module in (claims, harness):
        monkeypatch.setattr(module, "visible_gpus", lambda: [5, 7])
    for name, replacement in (("_run", run), ("_model_arguments", nothing), ("figures_in", nothing)):
        monkeypatch.setattr(harness, name, replacement)
    with disable_run_logger():
        yield found


def test_tasks_run_on_gpus_that_nobody_has(ran: list[tuple[str | None, int]], tmp_path: Path) -> None:
    """Of a folder and a file per GPU. Controls: what is free otherwise, and more than there are."""
    told: Any = ("model", ["arithmetic"], None, str(tmp_path / "results"))
    with claims.claimed(claims.Wanted((0,)), "a training"):
        harness.run_tasks.fn(*told, 1, False)
    harness.run_tasks.fn(*told, 2, False)
    assert ran == [("7", 2), ("5,7", 3)]
    with pytest.raises(UserError, match="tensor_parallel=3, and 2 GPUs are visible"):
        harness.run_tasks.fn(*told, 3, False)
