"""Commands as tests write them: a name and plain data, with the defaults of fields that are left out filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import count
from typing import Any, get_type_hints

from penstock.engines.commands import (
    build,
    checkpoint,
    finetuning,
    forward,
    logprob_gap,
    reference,
    reshard,
    rollout,
    update,
)
from penstock.engines.commands.finetuning import PreferenceMeasured
from penstock.engines.commands.message import Command, decode, encode, name_of
from penstock.engines.commands.update import Updated

MODULES = (build, checkpoint, finetuning, forward, logprob_gap, reference, reshard, rollout, update)
KINDS: dict[str, type[Command[Any]]] = {
    name_of(kind): kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Command) and kind is not Command
}


NUMBERED = ("generate", "sample_to_compare")
ASKED, INSIDE = count(1), count(1_000_000)  # numbers of generations that tests ask for, and of those of inspections


def numbered(name: str, arguments: Mapping[str, Any], numbers: Iterator[int] = ASKED) -> Mapping[str, Any]:
    """Return a command's arguments, of a generation with a number."""
    return {"number": next(numbers), **arguments} if name in NUMBERED else arguments


def command_of(name: str, arguments: Mapping[str, Any]) -> Command[Any]:
    """Return the command of a name."""
    command: Command[Any] = decode(KINDS[name], _filled(KINDS[name], plain(arguments)), name)
    return command


def plain(value: Any) -> Any:
    """Return a value as the channel carries it: of messages their fields."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return encode(value)


def _filled(kind: Any, value: Any) -> Any:
    if not (isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict)):
        return value
    hints, defaults = get_type_hints(kind), {}
    for field in fields(kind):
        if field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return {name: _filled(hints.get(name), item) for name, item in {**defaults, **value}.items()}


def figures_of(reply: Any) -> Any:
    """Return a reply; of one that holds figures alone, these."""
    return reply.metrics if isinstance(reply, Updated | PreferenceMeasured) else reply
