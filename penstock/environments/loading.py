"""From `environment.type` to a class that makes episodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from configs.sections.rollout import EnvironmentConfig
from penstock.base.errors import UserError
from penstock.environments.environment import Environment
from penstock.usercode.imports import import_named

EXAMPLE = "penstock.environments.calculator:Calculator"


def load_environment(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Import the class and return what makes one episode of it.

    Raises:
        UserError: it cannot be imported, or made with `environment.settings`, or is no environment.
    """
    make = import_named("environment.type", config.type, "class", EXAMPLE)
    try:
        episode = make(**config.settings)
    except Exception as error:
        raise UserError(
            f"environment.type '{config.type}' cannot be made: {type(error).__name__}: {error}",
            "It is called with environment.settings as keyword arguments.",
        ) from error
    for name in ("reset", "step"):
        if not callable(getattr(episode, name, None)):
            raise UserError(
                f"environment.type '{config.type}' has no method '{name}'.",
                "An environment has reset(row, seed) and step(text); docs/environments.md shows one.",
            )
    stop_texts(config.type, episode)
    return lambda: make(**config.settings)


def is_async(episode: Environment) -> bool:
    """Return whether calls of an environment run concurrently: its `reset` or its `step` is `async`."""
    return inspect.iscoroutinefunction(episode.reset) or inspect.iscoroutinefunction(episode.step)


def stop_texts(spec: str, episode: Any) -> tuple[str, ...]:
    """Return the texts that end a turn.

    Raises:
        UserError: `stop` is not a tuple or list of texts.
    """
    stop = getattr(episode, "stop", ())
    if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) and text for text in stop):
        raise UserError(
            f"environment.type '{spec}' has a 'stop' of {stop!r}, not texts.", 'Write for instance stop = ("]",).'
        )
    return tuple(stop)
