"""Refresh the reference: it becomes a copy of the actor, and the KL starts from 0 again."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.configs.schema import TrainConfig
from penstock.engines.commands.reference import ReadReference, RefreshReference, WriteActor
from penstock.session.session import Training, timed


def refresh_due(config: TrainConfig, iteration: int) -> bool:
    """Whether the reference is to be refreshed after the update of `iteration`; not after the last one."""
    kl = config.algorithm.kl
    if kl is None or kl.refresh_every is None:
        return False
    return iteration % kl.refresh_every == 0 and iteration < config.iterations


@task(task_run_name="refresh-reference-{iteration:06d}", cache_policy=NO_CACHE)
def refresh_reference(training: Training, iteration: int) -> dict[str, float]:
    """Make the reference a copy of the actor after `iteration`: in place, or through a file to another group.

    Raises:
        RuntimeError: the reference of some rank is not a copy of the actor afterwards.
    """
    session, key = training.session(), f"{iteration}/refresh_reference"
    metrics: dict[str, float] = {}
    with timed(training, metrics, "refresh_reference"):
        if session.groups["actor"] is session.groups["reference"]:
            replies = session.call("reference", RefreshReference(), key)
        else:
            path = training.run.path / "reference.safetensors"
            replies = session.call("actor", WriteActor(str(path)), f"{iteration}/write_actor")
            replies += session.call("reference", ReadReference(str(path)), key)
            path.unlink()
    if len({digest for reply in replies for digest in reply.digests}) != 1:
        raise RuntimeError(f"after iteration {iteration} the reference is not a copy of the actor on every rank")
    return metrics
