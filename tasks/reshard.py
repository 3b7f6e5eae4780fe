"""Reshard: the rollout engine gets the actor's new weights, verified and stamped with their policy version."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.session import Training, timed
from tasks.settings import Settings


@task(task_run_name="reshard-{settings.iteration:06d}", cache_policy=NO_CACHE)
def reshard(training: Training, settings: Settings, version: int) -> dict[str, float]:
    """Bring the weights of policy `version` to the rollout engine; return bytes and seconds."""
    metrics: dict[str, float] = {}
    with timed(metrics, "reshard"):
        replies = training.session().call("rollout", "reshard", f"{settings.iteration}/reshard", version=version)
    return metrics | {"reshard/bytes": float(sum(reply["bytes"] for reply in replies))}
