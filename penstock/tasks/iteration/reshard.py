"""Reshard: the rollout engine gets the actor's new weights, verified and stamped with their policy version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.engines.commands.reshard import Connect, Listen, Reshard, Resharded
from penstock.engines.groups.group import EngineGroup
from penstock.session.events import tell_of_elastic
from penstock.session.session import Meeting, Session, Training, shared_by, timed
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
    tell_of_elastic(training, settings.iteration)
    return metrics | {
        "reshard/rank_s": max(reply.transfer_s for reply in replies),
        "reshard/bytes": float(max(reply.bytes for reply in replies)),
    }


def bring_weights(session: Session, key: str, version: int) -> list[Resharded]:
    """Reshard on every rank that takes part; return the replies of the rollout engines' ranks.

    Elastic groups that are ready join before, and get their first prompts after it; one that is silent is left out.
    """
    coming = []
    if session.elastic is not None:
        session.elastic.leave_out_silent()
        coming = session.elastic.ready()
    groups = [*session.rollout_groups, *coming]
    taking_part = list(dict.fromkeys((session.groups["actor"], *groups)))
    if len(taking_part) > 1:
        _connect(session, groups)
    replies = session.call_all(dict.fromkeys(taking_part, Reshard(version)), key)
    if session.elastic is not None:
        session.elastic.join(coming)
    return [reply for group in groups for reply in replies[group]]


def _connect(session: Session, groups: Sequence[EngineGroup]) -> None:
    """Let the groups of actor and rollouts find each other, where they are others than those that have last."""
    if session.meeting is None:
        store = session.call("actor", Listen(), "0/listen")[0]
        assert store is not None
        session.meeting = Meeting(store)
    meeting = session.meeting
    if meeting.groups == tuple(groups):
        return
    ranks = sum(len(group.spec.devices) for group in groups)
    commands = {session.groups["actor"]: Connect(meeting.store, meeting.number, ranks)}
    for group, sharing in shared_by(groups).items():
        commands[group] = Connect(meeting.store, meeting.number, ranks, sharing.before)
    session.call_all(commands, f"{meeting.number}/connect")
    session.meeting = replace(meeting, groups=tuple(groups), number=meeting.number + 1)
