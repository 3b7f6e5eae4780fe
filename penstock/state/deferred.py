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
        again: the iteration that has begun them anew, where others go on (`rollout.carry.max_wait`); 0: none.
        rests: whether it is to be begun anew there, and does not go on.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: int
    since: int
    begun: int = 1
    again: int = 0
    rests: bool = False

    def as_row(self) -> list[int]:
        """Return its values as JSON has them; the last two only where they say something."""
        row = [self.row, self.since, self.begun]
        return [*row, self.again, self.rests] if self.again or self.rests else row

    @property
    def begun_in(self) -> int:
        """The iteration that has begun its responses, or begun them anew where others go on."""
        return self.again or self.since
