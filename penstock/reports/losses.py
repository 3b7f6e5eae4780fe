"""What a run lost while it went on, for the report: a line each, from its events (penstock/state/events.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reports.headline import duration
from penstock.state.events import GIVEN_UP, RECOVERED, is_loss


@dataclass(frozen=True)
class Loss:
    """A loss in words: what was lost and when, why, how fast that was noticed, and how the run went on."""

    what: str
    when: str
    why: str
    noticed: str
    then: str


def losses_of(events: Sequence[Mapping[str, Any]]) -> list[Loss]:
    """Return the losses among the events of a run, the oldest first."""
    ends = {event["number"]: event for event in events if event["event"] in (RECOVERED, GIVEN_UP)}
    return [_loss(event, ends.get(event["number"])) for event in events if is_loss(event)]


def _loss(lost: Mapping[str, Any], end: Mapping[str, Any] | None) -> Loss:
    if lost["event"] == "FlowLost":
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
