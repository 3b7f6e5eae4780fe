"""Two runs are one where all but times is equal; one bit elsewhere is found, and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.base.ragged import Ragged
from penstock.chaos.comparison import differences
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics


def tensors(path: Path, value: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.full(4, value, np.float32)}, path)


def experience(run: RunFolder, last_token: int) -> None:
    tokens = Ragged.of([[5, 6], [7, last_token]], np.int32)
    run.experience(1).parent.mkdir(exist_ok=True)
    columns = {"prompt_id": ["a", "b"], "response_tokens": tokens, "reward": np.array([0.0, 1.0])}
    write_columns(run.experience(1), columns)


@pytest.fixture
def alone(tmp_path: Path) -> RunFolder:
    """A run of one iteration."""
    run = RunFolder(tmp_path / "alone")
    tensors(run.model("final") / "model.safetensors", 1.0)
    tensors(run.checkpoint(1) / "main-rank0.safetensors", 2.0)
    append_metrics(run, 1, {"actor/loss": 0.5, "time/iteration_s": 1.0})
    experience(run, 8)
    write_manifest(run, Manifest(Progress(iteration=1), checkpoint="000001"))
    run.samples(1).parent.mkdir()
    run.samples(1).write_text("{}")
    return run


def figure(run: RunFolder) -> None:
    append_metrics(run, 1, {"actor/loss": 0.5000000001})


def time(run: RunFolder) -> None:
    append_metrics(run, 1, {"time/iteration_s": 7.0, "gpu/clock_mhz": 1500.0})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: None, []),
        (time, []),
        (figure, ["figures: 1 differ, the first is (1, 'actor/loss')"]),
        (lambda run: tensors(run.model("final") / "model.safetensors", 1.5), ["weights: 1 differ"]),
        (lambda run: tensors(run.checkpoint(1) / "main-rank0.safetensors", 1.5), ["state of the last checkpoint: 1"]),
        (lambda run: experience(run, 9), ["experience: 000001.parquet differs in response_tokens"]),
        (lambda run: run.experience(1).unlink(), ["experience: 000001.parquet is missing"]),
        (lambda run: run.samples(1).write_text("{ }"), ["samples: 1 differ, the first is 000001.json"]),
        (lambda run: append_metrics(run, 2, {"actor/loss": 1.0}), ["figures: (2, 'actor/loss') is in one of the runs"]),
    ],
    ids=["nothing", "times", "figure", "weights", "state", "tokens", "no experience", "samples", "more figures"],
)
def test_what_differs_is_named(alone: RunFolder, change: Callable[[RunFolder], None], said: list[str]) -> None:
    """Each alone. Control: a copy, and one whose times differ, are equal."""
    other = RunFolder(alone.path.with_name("other"))
    shutil.copytree(alone.path, other.path)
    change(other)
    found = differences(alone, other)
    assert len(found) == len(said)
    assert all(sentence.startswith(beginning) for sentence, beginning in zip(found, said, strict=True))
