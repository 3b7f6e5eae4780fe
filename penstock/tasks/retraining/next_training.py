"""Next training: a recipe on new data, from the newest version of its registered model."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.checks.model.own_code import check_noted
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session.registry.judgement import check_comparable
from penstock.tasks.retraining.newest_data import NewestData
from penstock.trackers.registry import LATEST, SCHEME
from penstock.trackers.table import find_registry


@task(task_run_name="next-training", cache_policy=NO_CACHE)
def next_training(config: TrainConfig, newest: NewestData) -> TrainConfig:
    """Return the recipe with the data, and with the newest version in place of its model once there is one.

    Raises:
        UserError: the recipe takes no data of a file, trusts whatever code the version brings, or what it would measure
            cannot be compared with what is best.
    """
    name = str(config.record.registered_model)
    tree = config.model_dump(exclude={"base"})
    tree["data"]["train"] = newest.path
    registry = find_registry(Path(config.folder))
    versions = registry.versions(name) if registry is not None else []
    if versions:
        check_noted(config.model, f"{SCHEME}{name}@{LATEST}", Path(str(versions[0].folder)))
        tree["model"] |= {"path": str(versions[0]), "version": None, "tiny": None}
    following = config_from_mapping(tree, f"the recipe on {newest.path}")
    if registry is not None and versions:
        check_comparable(following, registry, name)
    get_run_logger().info("training on %s, from %s", newest.path, following.model.path or "a tiny model")
    return following
