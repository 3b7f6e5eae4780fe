"""Group filters as users write them, and some that are wrong."""

from __future__ import annotations

from typing import Any


def varied(responses: list[str], row: dict[str, Any], least: int = 2) -> bool:
    """Keep groups of so many different responses, and every group of a rare topic."""
    return row["topic"] == "rare" or len(set(responses)) >= least


def by_part(parts: dict[str, Any], prompt: str) -> Any:
    """Keep what is not all of one form; a numpy truth value."""
    return parts["form"].std() > 0


def undecided(rewards: Any) -> Any:
    """A number where true or false is asked for."""
    return rewards.mean()


def raises(prompt_id: str) -> bool:
    """What a typing error does."""
    raise KeyError(prompt_id)


def asks_for_more(rewards: Any, tokens: Any) -> bool:
    """An argument that filters do not get."""
    return True
