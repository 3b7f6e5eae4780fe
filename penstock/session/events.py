"""Events of a training: each is a line in its run folder, and goes to Prefect and the trackers.

They are losses, which together have a bound: what died, when that was noticed, how long the training then took to stand
where it goes on from, and how many tokens are generated a second time. And numerical faults, and elastic groups that
join or go. Alarms are told to Prefect alone: the metrics have them.

Left out: replacing what was lost (penstock/tasks/recover.py), what a fault is (penstock/tasks/iteration/faults.py).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.runtime import flow_run

from penstock.engines.groups.group import LostTooOften, RankLost
from penstock.session.machines.elastic import Joined
from penstock.session.session import Recovering, Training
from penstock.state.events import GIVEN_UP, JOINED, LEFT, RECOVERED, append_event, next_number, open_loss
from penstock.state.run_folder import read_metrics
from penstock.trackers.delivery import Delivery

FLOW = "penstock.flow"


def noted(training: Training, loss: RankLost) -> None:
    """Note a loss.

    Raises:
        LostTooOften: with this one it was more within `engine.restart_window_s` than `engine.restarts`.
    """
    session, engine, now = training.session(), training.config.engine, time.monotonic()
    session.lost_at = [at for at in session.lost_at if now - at <= engine.restart_window_s] + [now]
    number = next_number(training.run)
    if loss.flow_stacks:
        get_run_logger().warning("%s\nstacks of the flow:\n%s", loss.reason, loss.flow_stacks)
    session.recovering = Recovering(number, now)
    records = read_metrics(training.run)
    tell(
        training,
        type(loss).__name__,
        number=number,
        after=records[-1]["iteration"] if records else 0,
        during=session.phase,
        group=loss.group,
        rank=loss.rank,
        reason=loss.reason,
        unheard_s=round(loss.unheard_s, 3),
    )
    if len(session.lost_at) > engine.restarts:
        give_up(training)
        ended_by = too_often(loss, len(session.lost_at), engine.restarts, engine.restart_window_s)
        raise ended_by from (None if ended_by is loss else loss)


def tell_of_going_on(training: Training, loss: RankLost) -> None:
    """Log that the training goes on after a loss."""
    said = "group %s, rank %d: %s (during %s; log: %s). The training goes on"
    get_run_logger().warning(said, loss.group, loss.rank, loss.reason, training.session().phase, loss.log_file)


def give_up(training: Training) -> None:
    """Note that the training does not go on after the loss that was noted last."""
    recovering = training.session().recovering
    assert recovering is not None
    tell(training, GIVEN_UP, number=recovering.number)


def too_often(loss: RankLost, times: int, allowed: int, window_s: float) -> RankLost:
    """Return what ends a training: the loss itself where none is allowed."""
    if not allowed:
        return loss
    reason = f"{loss.reason}; of {times} losses within {window_s:g} s engine.restarts allows {allowed}"
    return LostTooOften(loss.group, loss.rank, reason, loss.log_file, loss.log_tail, loss.stacks, loss.unheard_s)


def tell_of_elastic(training: Training, iteration: int) -> None:
    """Note which elastic groups have joined or gone since this was last done."""
    elastic = training.session().elastic
    for news in elastic.news() if elastic is not None else ():
        if isinstance(news, Joined):
            tell(training, JOINED, group=news.group, after=iteration)
            get_run_logger().info("group %s has joined, and gets prompts from now on", news.group)
            continue
        tell(training, LEFT, group=news.group, after=iteration, reason=news.reason, for_good=news.for_good)
        then = "It stays away" if news.for_good else "It is brought again"
        said = "group %s is gone: %s. Others answer its prompts. %s"
        get_run_logger().warning(said, news.group, news.reason, then)


def take_up(training: Training) -> None:
    """Go on with the recovery from a loss that an earlier process of the run has noted, or that ended it."""
    if (lost := open_loss(training.run)) is not None:
        before_s = datetime.now(UTC).timestamp() - datetime.fromisoformat(lost["at"]).timestamp()
        training.session().recovering = Recovering(lost["number"], time.monotonic() - max(0.0, before_s))


def recovered(training: Training, place: str, tokens: int = 0) -> None:
    """Note that the ranks are where the training goes on from, if they had been lost.

    Args:
        place: what was restored, in words.
        tokens: of responses that are generated a second time.
    """
    session, recovering = training.session(), training.session().recovering
    if recovering is None:
        return
    session.recovering, seconds = None, time.monotonic() - recovering.began
    number, rounded_s = recovering.number, round(seconds, 3)
    tell(training, RECOVERED, number=number, recovered_s=rounded_s, place=place, tokens_lost=tokens)
    get_run_logger().warning("recovered after %.1f s: the training goes on from %s", seconds, place)


def tell(training: Training, what: str, **details: Any) -> None:
    """Write an event into the run folder, and let trackers and Prefect have it."""
    session, run = training.session(), training.run
    event = {"event": what, "at": datetime.now(UTC).isoformat(timespec="milliseconds")} | details
    append_event(run, event)
    session.deliver(f"the event '{what}'", Delivery.events, run)
    announce(training, what.replace(" ", "-"), event)


def announce(training: Training, name: str, payload: dict[str, Any]) -> None:
    """Let Prefect have an event of the run, `penstock.<name>`, for automations.

    Its label `penstock.flow` names the flow that was asked for, so that what `retrain` does starts no `retrain`.
    """
    session, run = training.session(), training.run
    resource = {
        "prefect.resource.id": f"penstock.run.{run.name}",
        "prefect.resource.name": run.name,
        FLOW: session.asked_for or session.kind,
    }
    emit_event(f"penstock.{name}", resource, payload=payload)


def flow_asked_for() -> str:
    """Return the name of the flow that a person, schedule or trigger has asked for: this one, or one far above it."""
    root = flow_run.root_flow_run_id
    if root is None or root == flow_run.id:
        return str(flow_run.flow_name or "")
    with get_client(sync_client=True) as client:
        return str(client.read_flow(client.read_flow_run(UUID(root)).flow_id).name)
