"""What a run lost while it went on, for the report: a line each, from its events (penstock/state/events.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reports.headline import duration
from penstock.state.events import FLOW_LOST, GIVEN_UP, JOINED, LEFT, RECOVERED, is_loss


@dataclass(frozen=True)
class Loss:
    """A loss in words: what was lost and when, why, how fast that was noticed, and how the run went on."""

    what: str
    when: str
    why: str
    noticed: str
    then: str


def losses_of(events: Sequence[Mapping[str, Any]]) -> list[Loss]:
    """Return the losses among the events of a run, the oldest first, elastic groups that are gone among them."""
    ends = {event["number"]: event for event in events if event["event"] in (RECOVERED, GIVEN_UP)}
    found = []
    for place, event in enumerate(events):
        if event["event"] == LEFT:
            found.append(_gone(event, events[place + 1 :]))
        elif is_loss(event):
            found.append(_loss(event, ends.get(event["number"])))
    return found


def _gone(event: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> Loss:
    """Return the loss of an elastic group, which holds nothing up."""
    joined = (other for other in later if other["event"] == JOINED and other["group"] == event["group"])
    again = next((f"joined again after {other['after']}" for other in joined), "has not joined again")
    return Loss(
        what=f"elastic group {event['group']}",
        when=f"after {event['after'] - 1}" if event["after"] else "at its start",
        why=event["reason"],
        noticed="at once",
        then=f"others answered its prompts; it {'stays away' if event['for_good'] else again}",
    )


def _loss(lost: Mapping[str, Any], end: Mapping[str, Any] | None) -> Loss:
    if lost["event"] == FLOW_LOST:
        return Loss("the flow's process", lost["at"], lost["reason"], "at once", _then(end))
    host = " with its host" if lost["event"] == "HostLost" else ""
    return Loss(
        what=f"group {lost['group']}, rank {lost['rank']}{host}",
        when=f"after {lost['after']}, during {lost['during']}",
        why=lost["reason"],
        noticed=f"within {lost['unheard_s']:.1f} s",
        then=_then(end),
    )


def _then(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "the run ended before it had recovered"
    if end["event"] == GIVEN_UP:
        return "given up"
    again = f", {end['tokens_lost']:,} tokens again" if end["tokens_lost"] else ""
    return f"from {end['place']} after {duration(end['recovered_s'])}{again}"
