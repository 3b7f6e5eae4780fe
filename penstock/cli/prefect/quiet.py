"""Keeps off the terminal what Prefect says of an end that the command line tells in a sentence of its own.

What else it says stands above the line of a training's progress, not in it. Only off the terminal: the Prefect server
still gets every record, tracebacks included.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from prefect.logging.handlers import PrefectConsoleHandler

from penstock.base.errors import FailedInWords, UserError
from penstock.cli.prefect.server import Terminated
from penstock.session.flow_runs.failures import SAID

# Told by session/flow_runs/failures.py, as are all mistakes and failures in words; a loss after which the training goes
# on is told by the task that recovers from it.
TOLD = (
    "RankLost",
    "HostLost",
    "OutOfMemory",
    "LostTooOften",
    "HostFailed",
    "EngineError",
    "PermissionError",
)
INTERRUPTED = ("Execution was aborted by an interrupt signal", "Execution was aborted by a termination signal")
BY_PREFECT = "encountered an exception"  # in the message of each state that Prefect makes of one
# Of flow runs, of task runs, and of either before it has a name: an interruption may fall there, too.
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
NAMED = re.compile(r"exception(?: during execution)?:? (\w+)")  # where Prefect's words name the kind of an exception
# How Prefect's own words of an end begin.
ENDS = ("Finished in state", "Encountered exception", "Task run failed with", "Crash detected")


def _is_not_told(record: logging.LogRecord) -> bool:
    if getattr(record, SAID, False):
        return False
    said = record.getMessage()
    if not record.name.startswith(LOGGERS):
        return True
    if isinstance(sys.exc_info()[1], Terminated):  # in Prefect's words it is any system exit
        return False
    if not said.startswith(ENDS) or " - Retry " in said:
        return True
    if said.startswith("Finished in state Failed") and BY_PREFECT not in said:
        return False
    if any(words in said for words in INTERRUPTED):
        return False
    named = NAMED.search(said)
    kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else named[1] if named else ""
    return kind not in {*TOLD, *_names_of(UserError), *_names_of(FailedInWords)}


def _names_of(kind: type[Exception]) -> set[str]:
    """Return the names of a class and of all below it: a state has an exception's name alone."""
    return {kind.__name__}.union(*map(_names_of, kind.__subclasses__()))


class _Current:
    """Standard error as it is at the time: while a line lives on the terminal, rich puts itself in its place."""

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":  # by which a console of rich's own, as Prefect's is, sees through the other
            raise AttributeError(name)
        return getattr(sys.stderr, name)


@contextmanager
def quiet_terminal() -> Iterator[None]:
    """Keep Prefect's words about an interruption, a user's mistake or a lost rank off the terminal meanwhile.

    Its other words go above a live line; where standard error is no terminal they go where they went.
    """
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler)]
    files = [handler.console.file for handler in handlers]
    for handler in handlers:
        handler.addFilter(_is_not_told)
        if sys.stderr.isatty():
            handler.console.file = cast("IO[str]", _Current())
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            handler.removeFilter(_is_not_told)
            handler.console.file = file
