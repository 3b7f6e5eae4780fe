"""Reshard: the rollout engine gets the actor's new weights, verified and stamped with their policy version."""

from __future__ import annotations

from itertools import accumulate

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.commands.reshard import Connect, Listen, Reshard, Resharded
from engines.groups.group import EngineGroup
from penstock.session.session import Session, Training, timed
from penstock.session.settings import Settings


@task(task_run_name="reshard-{settings.iteration:06d}", cache_policy=NO_CACHE)
def reshard(training: Training, settings: Settings, version: int) -> dict[str, float]:
    """Bring the weights of policy `version` to the rollout engine.

    Returns `time/reshard_s`; `reshard/rank_s`, the longest that a rank worked on it; `reshard/bytes`, the most that
    reached a rank of the rollout engine.
    """
    metrics: dict[str, float] = {}
    training.session().say("reshard")
    with timed(training, metrics, "reshard"):
        replies = bring_weights(training.session(), f"{settings.iteration}/reshard", version)
    return metrics | {
        "reshard/rank_s": max(reply.transfer_s for reply in replies),
        "reshard/bytes": float(max(reply.bytes for reply in replies)),
    }


def bring_weights(session: Session, key: str, version: int) -> list[Resharded]:
    """Reshard on every rank that takes part; return the replies of the rollout engines' ranks."""
    replies = session.call_all(dict.fromkeys(_groups(session), Reshard(version)), key)
    return [reply for group in session.rollout_groups for reply in replies[group]]


def connect_groups(session: Session) -> None:
    """Let the groups of actor and rollouts find each other, if they are not one; before their first reshard."""
    if len(_groups(session)) == 1:
        return
    store = session.call("actor", Listen(), "0/listen")[0]
    assert store is not None
    sizes = [len(group.spec.devices) for group in session.rollout_groups]
    commands = {session.groups["actor"]: Connect(store, sum(sizes))}
    for group, before in zip(session.rollout_groups, accumulate(sizes, initial=0), strict=False):
        commands[group] = Connect(store, sum(sizes), before)
    session.call_all(commands, "0/connect")


def _groups(session: Session) -> list[EngineGroup]:
    return list(dict.fromkeys((session.groups["actor"], *session.rollout_groups)))
