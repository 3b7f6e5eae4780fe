"""What ranks, hosts and their flow say to each other, and a check of it: what comes over the wire is read only after.

Keys tell who speaks, not that it makes sense: memory may be damaged, or the other side be of another version. A message
that is none costs its sender, by name, and never the thread that reads for all. Left out: the fields of commands and of
their replies, which are decoded where they are carried out and asked for (penstock/engines/commands/message.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import NUMERICAL_FAULTS, UserError
from penstock.engines.commands.message import WrongMessage, decode

LONGEST_REASON = 300

Shapes = Mapping[str, Mapping[str, Any]]  # the types of fields, by kind of message and name


@dataclass(frozen=True)
class Mistake:
    """A `UserError`, as it travels; `kind` is the name of its class."""

    problem: str
    remedy: str
    kind: str


def mistake_of(error: UserError) -> Mistake:
    """Return an error as it travels."""
    return Mistake(error.problem, error.remedy, type(error).__name__)


def error_of(mistake: Mistake) -> UserError:
    """Return the error that travelled, of its own class if that is a numerical fault."""
    return NUMERICAL_FAULTS.get(mistake.kind, UserError)(mistake.problem, mistake.remedy)


BY_RANKS: Shapes = {
    "heartbeat": {},
    "hello": {"pid": int},
    "news": {"command": str, "key": str, "result": dict[str, Any]},
    "reply": {"command": str, "key": str, "result": dict[str, Any]},
    "error": {"command": str, "key": str, "traceback": str, "user": Mistake | None, "out_of_memory": bool},
}
BY_HOSTS: Shapes = {
    "heartbeat": {},
    "alive": {},
    "hello": {"machine": str, "pid": int},
    "exit": {"group": str, "epoch": int, "rank": int, "reason": str},
    "reply": {"number": int, "result": Any},
    "mistake": {"number": int, "user": Mistake},
    "error": {"number": int, "traceback": str},
}
TO_HOSTS: Shapes = {
    "alive": {},
    "shutdown": {},
    "command": {"number": int, "command": str, "fields": dict[str, Any]},
}


def checked(message: Any, shapes: Shapes) -> dict[str, Any]:
    """Return a message that came, with its fields decoded.

    Args:
        message: what `channel.unpack` made of the bytes, or the error that it raised.
        shapes: of the messages that the sender may send.

    Raises:
        WrongMessage: it is none of them; says why in at most LONGEST_REASON characters.
    """
    if isinstance(message, WrongMessage):
        raise message
    kind = message.get("kind") if isinstance(message, dict) else None
    shape = shapes.get(kind) if isinstance(kind, str) else None
    if shape is None:
        what = f"'{kind}'" if isinstance(kind, str) else f"a {type(message).__name__}"
        raise WrongMessage(f"{what:.{LONGEST_REASON}} is of no kind that is known")
    if message.keys() != {"kind", *shape}:
        # Values stay out of words: they may be nested so deep that Python cannot write them.
        names = ", ".join(sorted(name if isinstance(name, str) else f"a {type(name).__name__}" for name in message))
        raise WrongMessage(f"a message with the fields {names:.{LONGEST_REASON}}")
    try:
        return {"kind": kind} | {name: decode(of, message[name], name) for name, of in shape.items()}
    except WrongMessage as error:
        raise WrongMessage(f"a message '{kind}': {str(error):.{LONGEST_REASON}}") from None
