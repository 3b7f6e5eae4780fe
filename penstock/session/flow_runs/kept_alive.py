"""Flow runs that Prefect starts again by itself where they had crashed, and how often that may be.

The automation that `penstock deploy` makes does so with runs that have a tag, as `penstock train --keep-alive` does
with the process that it waits beside. The run counts its crashes itself, from the states that the server has of it,
and fails where they are too many: a failed run is not started again. Left out: a run that a person starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from penstock.base.errors import FailedInWords
from penstock.configs.sections.run import EngineConfig

KEEP_ALIVE = "keep-alive"  # the tag
STARTED_AGAIN = "It had crashed, and is kept alive: it goes on."  # message of the state that the automation sets


class FlowLostTooOften(FailedInWords):
    """A flow run crashed more often than it is started again."""


def crashes(engine: EngineConfig) -> int:
    """Return how often this flow run has crashed lately, if it was started again for that; else 0.

    Raises:
        FlowLostTooOften: more often than it is started again.
    """
    if (flow_run.run_count or 0) <= 1 or KEEP_ALIVE not in (flow_run.tags or ()):
        return 0
    with get_client(sync_client=True) as client:
        return counted(client.read_flow_run_states(UUID(flow_run.id)), engine)


def counted(states: Sequence[State], engine: EngineConfig) -> int:
    """Return how often a flow run has crashed lately; 0 where a person has started it again.

    Args:
        states: that it has had, the newest last.
        engine: says how often it is started again, and what is lately.

    Raises:
        FlowLostTooOften: more often than that.
    """
    asked = [state for state in states if state.is_scheduled()]
    if not asked or asked[-1].message != STARTED_AGAIN:
        return 0
    since = datetime.now(UTC) - timedelta(seconds=engine.restart_window_s)
    lately = [state.is_crashed() and state.timestamp >= since for state in states]
    times = sum(crashed and not before for before, crashed in pairwise([False, *lately]))  # a worker may say it twice
    if times > engine.restarts:
        raise FlowLostTooOften(
            f"the flow run crashed {times} times within {engine.restart_window_s:g} s; engine.restarts allows "
            f"{engine.restarts}\n  see what ends its process (its worker's log, the kernel's); 'Retry' goes on anyway"
        )
    return times
