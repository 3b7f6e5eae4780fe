"""From `environment.type` to a class that makes episodes: an environment, one whose methods are tools, or an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.agent import AgentEpisode, is_agent
from penstock.environments.environment import Environment
from penstock.environments.mcp import Servers
from penstock.environments.openenv import Tools
from penstock.environments.tools import AsyncToolEnvironment, ToolEnvironment, has_tools, schemas_of, with_tools
from penstock.usercode.imports import import_named
from penstock.usercode.sandbox import check_boxed

Tooled = ToolEnvironment | AsyncToolEnvironment | Servers | Tools
Played = Environment | Tooled | AgentEpisode
EXAMPLE = "penstock.environments.calculator:Calculator"


def load_environment(config: EnvironmentConfig) -> Callable[[], Played]:
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
    check_boxed(f"environment.type '{config.type}'", episode, "environment.sandbox", config.sandbox)
    check_players(config, episode)
    if is_agent(episode):
        return lambda: AgentEpisode(make(**config.settings), config.max_paths > 1)
    if config.max_paths > 1:
        raise UserError(
            f"'environment.max_paths' has no effect with '{config.type}', whose episodes are one conversation each.",
            "Remove it; of an agent, which asks the policy itself, several are learnt from (docs/environments.md).",
        )
    if isinstance(episode, Servers | Tools):
        return lambda: make(**config.settings)
    if has_tools(episode):
        return lambda: with_tools(make(**config.settings))
    if config.tool_parser is not None:
        raise UserError(
            f"'environment.tool_parser' has no effect with '{config.type}', which has no tools.",
            "Remove it; docs/environments.md shows a class with tools.",
        )
    for name in ("reset", "step"):
        if not callable(getattr(episode, name, None)):
            raise UserError(
                f"environment.type '{config.type}' has no method '{name}'.",
                "An environment has reset(row, seed) and step(text); docs/environments.md shows one.",
            )
    stop_texts(config.type, episode)
    return lambda: make(**config.settings)


def check_players(config: EnvironmentConfig, episode: object) -> None:
    """Check that the recipe has the agents of a game, in the class's order, and no others.

    Raises:
        UserError: it has not, or the class is no game.
    """
    agents, is_no_game = getattr(episode, "agents", None), is_agent(episode) or has_tools(episode)
    if config.agents is None and (agents is None or is_no_game):  # then it is an attribute like any other
        return
    if agents is None:
        raise UserError(
            f"'environment.agents' has no effect with '{config.type}', which names no agents.",
            "Remove it; docs/environments.md shows a game of several agents.",
        )
    if is_no_game:
        raise UserError(
            f"'{config.type}' names agents, and is played over HTTP or by tools, which a game of several is not.",
            "A game has reset(row, seed) and step(text); docs/environments.md shows one.",
        )
    if not isinstance(agents, (tuple, list)) or len(agents) < 2:
        raise UserError(
            f"'{config.type}' has 'agents' of {agents!r}, and a game has at least two.",
            'Write for instance agents = ("solver", "checker"), or give it another name if this is no game.',
        )
    if [*agents] != config.agents:
        known = ", ".join(map(str, agents))
        raise UserError(
            f"'{config.type}' is a game of the agents {known}, and environment.agents has "
            f"{', '.join(config.agents or ['none'])}.",
            f"Set environment.agents=[{known}].",
        )


def tools_told(config: EnvironmentConfig | None) -> list[dict[str, Any]] | None:
    """Return what the chat template is told of an environment's tools; None: it has none.

    Raises:
        UserError: as for `load_environment`, or a tool lacks an annotation or a description.
    """
    if config is None:
        return None
    episode = load_environment(config)()
    if isinstance(episode, Servers | Tools):
        return episode.schemas()
    return schemas_of(config.type, episode.played) if isinstance(episode, Tooled) else None


def asks_policy(config: EnvironmentConfig) -> bool:
    """Return whether the class is an agent, which asks the policy for its turns.

    Raises:
        UserError: as for `load_environment`.
    """
    return isinstance(load_environment(config)(), AgentEpisode)


def ends_turns_at(config: EnvironmentConfig) -> tuple[str, ...]:
    """Return the texts at which an environment ends turns, besides the model's own end.

    Raises:
        UserError: as for `load_environment`.
    """
    return stop_texts(config.type, load_environment(config)())


def is_async(episode: Played) -> bool:
    """Return whether calls of an environment run concurrently: one of its methods is `async`, or it is an agent."""
    if isinstance(episode, AgentEpisode):
        return True
    if isinstance(episode, Tooled):
        return not isinstance(episode, ToolEnvironment)
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
