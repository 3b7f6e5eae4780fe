"""What a command is, and how commands and replies travel: by the names of their fields.

A command's type names the type of its reply, so a type checker sees a wrong or missing field where a command is sent
as well as where it is carried out. On arrival every field is checked again: a rank does not compute with a message
that is not what the flow meant.

The modules beside this one hold the commands; each has a namesake in penstock/engines/ranks, where they are carried
out. Left out: the bytes (penstock/engines/groups/channel.py), which command goes to which rank
(penstock/session/session.py).
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Reply = TypeVar("Reply")


class Command(Generic[Reply]):
    """What every rank of a group is asked to do; each replies with a `Reply`.

    The reply's type is a message, None, or `X | None` where some ranks have nothing to say: of a rollout engine of
    several ranks only the first replies.
    """

    measured: ClassVar[bool] = True  # what it used on its ranks belongs to the figures of its iteration
    changes_state: ClassVar[bool] = False  # it changes what a snapshot copies, and waits for one that is being taken
    news: ClassVar[type] = NoneType  # what its ranks tell ahead of their replies


class WrongMessage(TypeError):
    """A message lacks a field, has one too many, or holds something of another type."""


def name_of(kind: type[Command[Any]]) -> str:
    """Return the name of a command as it travels and is logged: `update_actor` of `UpdateActor`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def reply_type(kind: type[Command[Any]]) -> Any:
    """Return the type that a command's definition gives its reply."""
    bases: tuple[Any, ...] = kind.__orig_bases__  # type: ignore[attr-defined]
    return next(get_args(base)[0] for base in bases if get_origin(base) is Command)


def encode(message: Any) -> Any:
    """Return a message as its fields by name, messages within it likewise; arrays are not copied. None stays None."""
    if isinstance(message, list) and message and is_dataclass(message[0]):
        return [encode(item) for item in message]
    if not is_dataclass(message):
        return message
    return {field.name: encode(getattr(message, field.name)) for field in fields(message)}


def decode(kind: Any, value: Any, place: str) -> Any:
    """Return the value of type `kind` that `encode` made `value` of.

    Args:
        kind: a message's type, or the type of a field: a plain type, `X | None`, a list, tuple, dict or Literal.
        value: what arrived; the channel makes lists of tuples.
        place: what errors call it.

    Raises:
        WrongMessage: a field is unknown or missing, or a value is not of its type.
    """
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_message(kind, value, place)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (other,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else decode(other, value, place)
    if origin is Literal and type(value) in map(type, arguments) and value in arguments:
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(decode(arguments[0], item, f"{place}[{at}]") for at, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        key, item = arguments
        return {decode(key, name, place): decode(item, each, f"{place}[{name!r}]") for name, each in value.items()}
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise WrongMessage(f"{place} is to be {kind}, not {type(value).__qualname__}")


def decode_reply(kind: type[Command[Reply]], value: Any) -> Reply:
    """Return the reply to a command of type `kind`; raises as `decode`."""
    reply: Reply = decode(reply_type(kind), value, f"the reply to {name_of(kind)}")
    return reply


def decode_news(kind: type[Command[Any]], value: Any) -> Any:
    """Return what a rank told ahead of its reply to a command of type `kind`; raises as `decode`."""
    return decode(kind.news, value, f"news of {name_of(kind)}")


def _decode_message(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise WrongMessage(f"{place} is to be the fields of {kind.__name__}, not {type(value).__qualname__}")
    types = _field_types(kind)
    if unknown := value.keys() - types.keys():
        raise WrongMessage(f"{place}: {kind.__name__} has no field {', '.join(sorted(map(str, unknown)))}")
    if missing := types.keys() - value.keys():
        raise WrongMessage(f"{place}: {kind.__name__} lacks {', '.join(sorted(missing))}")
    return kind(**{name: decode(types[name], item, f"{place}.{name}") for name, item in value.items()})


@cache
def _field_types(kind: type) -> dict[str, Any]:
    """Return the type of every field; those of a class as a whole, like `measured`, do not travel."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
