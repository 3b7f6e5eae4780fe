"""Newest data: a file, and whether a registered model has learnt from it.

It is the file of a pattern that was written last, or that of the tracker's dataset of a name (`dataset:NAME`), in the
newest run that was given one. A file is known by its content: a copy of an old one is nothing new, nor is one that is
only touched. Left out: files that are still being written, which look whole; whoever adds one renames it into its
place. The digest of a tracker's dataset, which each maker of one makes in its own way.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.errors import UserError
from penstock.base.files import sha256
from penstock.configs.schema import TrainConfig
from penstock.trackers.registry import DATA, Registry, Version
from penstock.trackers.table import find_registry


@dataclass(frozen=True)
class NewestData:
    """The newest file.

    Attributes:
        sha256: of its content.
        learnt_by: the newest version of the registered model whose training had this content; None: it is new.
    """

    path: str
    sha256: str
    learnt_by: Version | None


DATASET = "dataset:"  # before the name of a tracker's dataset


@task(task_run_name="newest-data", cache_policy=NO_CACHE)
def newest_data(data: str, config: TrainConfig) -> NewestData:
    """Return the newest file.

    Args:
        data: a pattern, `**` for folders at any depth, or `dataset:NAME`.

    Raises:
        UserError: there is none, or no registered model is named.
    """
    if (name := config.record.registered_model) is None:
        raise UserError("a retraining needs 'record.registered_model'", "name the model whose versions are to be made")
    registry = find_registry(Path(config.folder))
    newest = _of_dataset(data.removeprefix(DATASET), registry) if data.startswith(DATASET) else _of_pattern(data)
    digest = sha256(newest)
    versions = registry.versions(name) if registry is not None else []
    learnt = [version for version in versions if version.tags.get(DATA) == digest]
    get_run_logger().info("newest of %s: %s (sha256 %s)", data, newest, digest[:12])
    return NewestData(str(newest), digest, learnt[0] if learnt else None)


def _of_pattern(pattern: str) -> Path:
    matching = glob.glob(pattern, recursive=True)  # noqa: PTH207 - a Path globs below itself alone
    files = [path for path in map(Path, matching) if path.is_file()]
    if not files:
        raise UserError(f"no file matches '{pattern}'", "the pattern is relative to the folder where the worker runs")
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _of_dataset(name: str, registry: Registry | None) -> Path:
    if registry is None or (newest := registry.dataset(name)) is None:
        where = "there is no store yet" if registry is None else f"{registry.where} has none"
        raise UserError(
            f"no run was given a dataset '{name}': {where}",
            "whoever makes the data logs it: mlflow.log_input(mlflow.data.from_pandas(rows, source=FILE, name=NAME))",
        )
    if not newest.is_file():
        raise UserError(f"the newest dataset '{name}' is {newest}, and there is no such file", "log one that is there")
    return newest
