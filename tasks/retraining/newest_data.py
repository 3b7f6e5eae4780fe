"""Newest data: the file of a pattern that was written last, and whether a registered model has learnt from it.

A file is known by its content: a copy of an old one is nothing new, nor is one that is only touched. Left out: files
that are still being written, which look whole; whoever adds one renames it into its place. Versions of a
tracker's datasets: they name a source and a digest of their own making, and hold no rows to train on.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.schema import TrainConfig
from penstock.base.errors import UserError
from penstock.base.files import sha256
from penstock.trackers.registry import DATA, Version
from penstock.trackers.table import find_registry


@dataclass(frozen=True)
class NewestData:
    """The newest file of a pattern.

    Attributes:
        sha256: of its content.
        learnt_by: the newest version of the registered model whose training had this content; None: it is new.
    """

    path: str
    sha256: str
    learnt_by: Version | None


@task(task_run_name="newest-data", cache_policy=NO_CACHE)
def newest_data(pattern: str, config: TrainConfig) -> NewestData:
    """Return the file that was written last of those that match a pattern, `**` for folders at any depth.

    Raises:
        UserError: none matches, or no registered model is named.
    """
    if (name := config.record.registered_model) is None:
        raise UserError("a retraining needs 'record.registered_model'", "name the model whose versions are to be made")
    matching = glob.glob(pattern, recursive=True)  # noqa: PTH207 - a Path globs below itself alone
    files = [path for path in map(Path, matching) if path.is_file()]
    if not files:
        raise UserError(f"no file matches '{pattern}'", "the pattern is relative to the folder where the worker runs")
    newest = max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
    digest = sha256(newest)
    registry = find_registry(Path(config.folder))
    versions = registry.versions(name) if registry is not None else []
    learnt = [version for version in versions if version.tags.get(DATA) == digest]
    get_run_logger().info("newest of %d files: %s (sha256 %s)", len(files), newest, digest[:12])
    return NewestData(str(newest), digest, learnt[0] if learnt else None)
