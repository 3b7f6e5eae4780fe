"""A run's model becomes a version of the registry: what the version says is read from the run folder.

Registered are the model that a training ends with (penstock/tasks/export.py) and what `penstock export` makes of a
checkpoint; a checkpoint itself is the state of the engines, and no model. Twice is once: a version of the same weights
of the same run is found. Left out: which version is best (penstock/session/registry/judgement.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.checks.tokenized import CONTENT, noted
from penstock.configs.schema import TrainConfig
from penstock.state.manifest import Tracked
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.registry import (
    ACCURACY,
    DATA,
    FOLDER,
    ITERATION,
    PARENT,
    REWARD,
    RUN,
    WEIGHTS,
    NewVersion,
    Version,
    register,
    weights_digest,
)
from penstock.trackers.table import has_registry, registry_in


def new_version(run: RunFolder, config: TrainConfig, tracked: Tracked, folder: Path, iteration: int) -> NewVersion:
    """Return what the registry is told of a model of a run; its weights are read for their digest.

    Args:
        tracked: the tracker's run.
        folder: the model's.
        iteration: after which the weights were like this.
    """
    measured = {record["iteration"]: record["metrics"] for record in read_metrics(run)}.get(iteration, {})
    tags = {
        FOLDER: str(folder.resolve()),
        RUN: str(run.path.resolve()),
        ITERATION: str(iteration),
        WEIGHTS: weights_digest(folder),
        DATA: noted(run, "prompts").get(f"{CONTENT}data.train"),
        PARENT: config.model.version,
        ACCURACY: _with_interval(measured, "heldout/accuracy"),
        REWARD: _with_interval(measured, "heldout/reward"),
    }
    return NewVersion(
        str(config.record.registered_model), tracked.run, {name: str(value) for name, value in tags.items() if value}
    )


def with_registry(tracked: Iterable[Tracked]) -> Tracked | None:
    """Return the first of a run's trackers that has a registry; None: none has."""
    return next((item for item in tracked if has_registry(item.tracker)), None)


def _with_interval(metrics: dict[str, float], name: str) -> str | None:
    """Return a figure as text, with its 95 % interval where it was taken; None: it was not measured."""
    if name not in metrics:
        return None
    ends = [f"{metrics[f'{name}/{end}']:.4f}" for end in ("low", "high") if f"{name}/{end}" in metrics]
    return f"{metrics[name]:.4f}" + (f" [{', '.join(ends)}]" if ends else "")


def final_version(run: RunFolder, config: TrainConfig, tracked: Tracked) -> NewVersion:
    """Return what the registry is told of the model that a training ended with."""
    return new_version(run, config, tracked, run.model("final"), read_metrics(run)[-1]["iteration"])


def deliver_version(new: NewVersion, folder: Path) -> Version:
    """Add a version to the registry for the runs in a directory, unless it is there."""
    return register(registry_in(folder), new)
