"""Which function carries out which command: `@carries_out(UpdateActor)` stands above it.

A type checker compares the function's reply with the command's; that its argument is this command, and that no other
function has it, is seen at import. A command that is carried out in steps has a function that begins it and returns
`Later`. A command that comes while a generation is under way waits until it has ended, unless its function says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from penstock.engines.commands.message import Command, name_of
from penstock.engines.ranks.models import RankModels
from penstock.engines.rollout.decode_loop import Generation

Reply = TypeVar("Reply")
C = TypeVar("C", bound=Command[Any])
When = Callable[[RankModels], bool]  # whether a command may begin between two steps of a generation


@dataclass(frozen=True)
class Later(Generic[Reply]):
    """The reply to a command that has begun: `reply` makes it once the generation, which is submitted, has ended."""

    generation: Generation
    reply: Callable[[], Reply]


class Handler(NamedTuple):
    """The function that carries out a type of command."""

    kind: type[Command[Any]]
    function: Callable[[RankModels, Any], Any]
    during_generation: When
    beside: bool = False  # in a thread of its own, where a generation is under way


HANDLERS: dict[str, Handler] = {}  # by the command's name


def never(models: RankModels) -> bool:
    """Whether a command may begin during a generation that has no business there: it may not."""
    return False


def always(models: RankModels) -> bool:
    """Whether a command may begin during a generation that does no harm there: it may."""
    return True


def single_turns(models: RankModels) -> bool:
    """Whether generations may be under way together: with an environment one may, its workers know no more."""
    return models.config.environment is None


def trains_nothing(models: RankModels) -> bool:
    """Whether this rank's group has no model that is trained: what others do with theirs concerns it little."""
    return not models.trainers


def in_portions(models: RankModels) -> bool:
    """Whether what is complete of a generation is learnt from while the rest is generated."""
    return models.config.rollout.in_portions


def carries_out(
    kind: type[Command[Reply]], during_generation: When = never, beside: bool = False
) -> Callable[[Callable[[RankModels, C], Reply]], Callable[[RankModels, C], Reply]]:
    """Let the function below carry out the commands of a type.

    Args:
        beside: that which begins during a generation has a thread of its own, and the generation goes on meanwhile.

    Raises:
        TypeError: another function does, or this one takes another command.
    """

    def register(function: Callable[[RankModels, C], Reply]) -> Callable[[RankModels, C], Reply]:
        _register(Handler(kind, function, during_generation, beside))
        return function

    return register


def begins(
    kind: type[Command[Reply]], during_generation: When
) -> Callable[[Callable[[RankModels, C], Later[Reply]]], Callable[[RankModels, C], Later[Reply]]]:
    """Let the function below begin the commands of a type, whose reply comes later; as `carries_out` otherwise."""

    def register(function: Callable[[RankModels, C], Later[Reply]]) -> Callable[[RankModels, C], Later[Reply]]:
        _register(Handler(kind, function, during_generation))
        return function

    return register


def _register(handler: Handler) -> None:
    kind, name, function = handler.kind, name_of(handler.kind), handler.function
    if name in HANDLERS:
        raise TypeError(f"{name} is carried out by {HANDLERS[name].function.__qualname__} already")
    takes = get_type_hints(function).get("command")
    if takes is not kind:
        raise TypeError(f"{function.__qualname__} carries out {kind.__name__}, but takes {takes}")
    HANDLERS[name] = handler
