"""Where requests belong in an episode of several paths: behind the end of one, or at a turn where another begins.

A path is a conversation with a prompt of its own. One that begins at a turn of another has all that led there as its
prompt, token by token, so each token that the policy sampled is behind the prompt of exactly one path, and learnt from
once. What paths have in common counts once against the room of an episode, as it is computed once in an update
(penstock/engines/batches/trees.py): an episode of several paths computes no more tokens than one of a single path.

Left out: how requests become tokens (penstock/engines/rollout/agents.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import Paths
from penstock.engines.rollout.episode import Episode
from penstock.environments.gateway.asks import Ask


@dataclass(frozen=True)
class TurnBefore:
    """A turn that a request comes after.

    Attributes:
        end: how many tokens its path has at its end.
    """

    path: Episode
    end: int

    @property
    def tokens(self) -> list[int]:
        """All up to its end."""
        return self.path.until(self.end)

    @property
    def turn(self) -> list[int]:
        """Its own."""
        return self.path.turn(self.path.turn_ends.index(self.end) + 1)

    def is_free(self, drawn: Sequence[Episode]) -> bool:
        """Whether a turn may go on with its path: it is the last one, and none of `drawn` does already."""
        return self.end == self.path.turn_ends[-1] and not any(path is self.path for path in drawn)


def turn_before(episode: Episode, ask: Ask) -> TurnBefore | None:
    """Return the turn that a request comes after; None: it begins anew."""
    if ask.tokens is not None:
        ends = [TurnBefore(path, path.turn_ends[-1]) for path in episode.paths if path.turn_ends]
        found = [turn for turn in ends if ask.tokens[: len(known := turn.tokens)] == known]
        return max(found, key=lambda turn: len(turn.tokens), default=None)
    numbered = episode.numbered.get(ask.after) if ask.follows else None
    return None if numbered is None else TurnBefore(*numbered)


def begun_path(episode: Episode, prompt: list[int], drawn: int, limit: int) -> Episode | None:
    """Begin a path; None: what is new in its prompt leaves no token for each turn that is drawn.

    Args:
        drawn: turns that are, without its own.
        limit: of tokens behind the first prompt.
    """
    known = 0
    for path in (episode, *episode.branches):
        whole = path.until(len(path.tokens))
        if whole[known : known + 1] == prompt[known : known + 1]:  # else it has no more in common than another
            known = max(known, _common(prompt, whole))
    own = len(prompt) - known
    if limit - episode.size - own <= drawn:
        return None
    path = Episode(episode.row, episode.position, episode.sample, prompt, episode.seed, episode.version, own=own)
    episode.branches.append(path)
    return path


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if differ.size else length


def used_up(episode: Episode, limit: int) -> bool:
    """Whether turns that shared what was left of an episode have been cut and left nothing."""
    drawn = [placed.drawn[choice] for placed in episode.round for choice in placed.paths]
    return len(drawn) > 1 and any(request.truncated for request in drawn) and episode.size >= limit


def paths_of(episodes: Sequence[Episode]) -> Paths:
    """Return how the tokens of episodes are cut into paths."""
    others: list[list[list[int]]] = [[path.prompt for path in episode.paths[1:]] for episode in episodes]
    ends: list[Any] = [np.cumsum([len(path.tokens) for path in episode.paths]) for episode in episodes]
    return Paths(
        ends=Ragged.of(ends, np.int32),
        prompts=Ragged.of([[token for prompt in own for token in prompt] for own in others], np.int32),
        prompt_ends=Ragged.of([np.cumsum([len(prompt) for prompt in own]) for own in others], np.int32),
    )
