"""Whether two runs of one recipe are one: everything that does not measure the machine, to the last bit.

Compared are weights, the state of the last checkpoint, figures, experience, samples, what the sampler remembers, and
what MLflow holds. Left out: figures of the machine (penstock/state/measured.py), and logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.files import files_below, sha256
from penstock.base.ragged import Ragged
from penstock.reports.comparing.recorded import recorded_figures
from penstock.state.experience import column_names, read_columns
from penstock.state.manifest import read_manifest
from penstock.state.measured import is_measured
from penstock.state.run_folder import RunFolder, read_metrics


def differences(alone: RunFolder, other: RunFolder) -> list[str]:
    """Return in words where a run differs from the one that was left alone; nothing where it does not."""
    return [
        *_unequal("weights", _hashes(alone.model("final")), _hashes(other.model("final"))),
        *_unequal("state of the last checkpoint", _state(alone), _state(other)),
        *_unequal("figures", _figures(alone), _figures(other)),
        *_unequal("memory of the sampler", _text(alone.prompt_rewards), _text(other.prompt_rewards)),
        *_unequal("samples", _texts(alone.path / "samples"), _texts(other.path / "samples")),
        *_unequal("figures in the tracker", _tracked(alone), _tracked(other)),
        *_experience(alone, other),
    ]


def _unequal(what: str, alone: Mapping[Any, Any], other: Mapping[Any, Any]) -> Iterator[str]:
    """Say which of two mappings' values differ, by the first of them."""
    if missing := [key for key in alone if key not in other] + [key for key in other if key not in alone]:
        yield f"{what}: {missing[0]} is in one of the runs alone"
        return
    wrong = [key for key, value in alone.items() if value != other[key]]
    if wrong:
        yield f"{what}: {len(wrong)} differ, the first is {wrong[0]}"


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path) for path in files_below(folder) if path.suffix == ".safetensors"
    }


def _state(run: RunFolder) -> dict[str, str]:
    """Return the digests of what the manifest's checkpoint holds of the engines."""
    name = read_manifest(run).checkpoint
    return {} if name is None else _hashes(run.checkpoints / name)


def _figures(run: RunFolder) -> dict[tuple[int, str], float]:
    return {
        (record["iteration"], name): value
        for record in read_metrics(run)
        for name, value in record["metrics"].items()
        if not is_measured(name)
    }


def _tracked(run: RunFolder) -> dict[tuple[int, str], float]:
    """Return what MLflow holds; nothing of a run that others record."""
    tracked = next((item for item in read_manifest(run).tracked if item.tracker == "mlflow"), None)
    if tracked is None:
        return {}
    figures = recorded_figures(run.path.parent, tracked.run)
    return {key: value for key, value in figures.items() if not is_measured(key[1])}


def _text(path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes()} if path.is_file() else {}


def _texts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.json"))}


def _experience(alone: RunFolder, other: RunFolder) -> Iterator[str]:
    """Compare every column of every iteration's experience: prompts, tokens, rewards, advantages."""
    files = [path.name for path in sorted(alone.experience(0).parent.glob("[0-9]*.parquet"))]
    for name in files:
        here, there = (run.experience(0).parent / name for run in (alone, other))
        if not there.is_file():
            yield f"experience: {name} is missing"
            return
        names = column_names(here)
        if names != column_names(there):
            yield f"experience: {name} has other columns"
            return
        one, two = read_columns(here, names), read_columns(there, names)
        if wrong := [column for column in names if not _same(one[column], two[column])]:
            yield f"experience: {name} differs in {', '.join(wrong)}"
            return


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Ragged):
        return _same(one.values_T, two.values_T) and _same(one.offsets_B1, two.offsets_B1)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.tobytes() == two.tobytes()
    return bool(list(one) == list(two))
