"""Which function carries out which command: `@carries_out(UpdateActor)` stands above it.

A type checker compares the function's reply with the command's; that its argument is this command, and that no other
function has it, is seen at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from engines.commands.message import Command, name_of
from engines.ranks.models import RankModels

Reply = TypeVar("Reply")
C = TypeVar("C", bound=Command[Any])
Handler = Callable[[RankModels, Any], Any]

HANDLERS: dict[str, tuple[type[Command[Any]], Handler]] = {}  # by the command's name


def carries_out(
    kind: type[Command[Reply]],
) -> Callable[[Callable[[RankModels, C], Reply]], Callable[[RankModels, C], Reply]]:
    """Let the function below carry out the commands of a type.

    Raises:
        TypeError: another function does, or this one takes another command.
    """

    def register(handler: Callable[[RankModels, C], Reply]) -> Callable[[RankModels, C], Reply]:
        name = name_of(kind)
        if name in HANDLERS:
            raise TypeError(f"{name} is carried out by {HANDLERS[name][1].__qualname__} already")
        hints = get_type_hints(handler)
        if hints.get("command") is not kind:
            raise TypeError(f"{handler.__qualname__} carries out {kind.__name__}, but takes {hints.get('command')}")
        HANDLERS[name] = (kind, handler)
        return handler

    return register
