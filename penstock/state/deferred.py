"""A prompt that waits: it was drawn, and a rollout ended before all of its responses had.

Which prompts wait is part of a run's progress (penstock/state/manifest.py), so none is lost and none comes twice,
whatever dies. Left out: which rollout begins them again (penstock/session/rollout/rounds.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict


@dataclass(frozen=True)
class Deferred:
    """A waiting prompt.

    Attributes:
        row: of the table of training prompts.
        since: the iteration that has drawn it.
        begun: how often its responses were begun from their first tokens.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: int
    since: int
    begun: int = 1
