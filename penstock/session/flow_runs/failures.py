"""What is said of an exception that ends a run: a sentence where there is one, else its traceback.

The command line prints it, and on Prefect's pages it is the message of the flow run's state. A note on the exception,
such as how to go on, is part of it. Left out: a defect, of which the traceback tells more.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from penstock.base.errors import FailedInWords, UserError

if TYPE_CHECKING:
    from penstock.engines.groups.group import EngineError, RankLost

P = ParamSpec("P")
R = TypeVar("R")
MISTAKE, FAILURE = 2, 1  # exit codes
OF_ENGINES = ("penstock.engines.groups.group", "penstock.engines.groups.hosts")  # modules of their errors
LESS_MEMORY = "less is needed with a smaller micro_batch_tokens, gradient_checkpointing=true, or a higher zero_stage"
LINES = 10  # of a log or a traceback; the log file has all of them
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
ROUTINE = re.compile(r"\b(DEBUG|INFO|WARNING)\b|Warning:")
SAID = "penstock_said"  # attribute of an exception that a state tells, and of the log record that says the same


def ends_in_words(flow: Callable[P, R]) -> Callable[P, R]:
    """Let a flow fail with the words of the command line as the message of its state, and without a traceback.

    It stands between `@flow` and the function. Whoever calls the flow gets the exception all the same. A flow run that
    Prefect is to retry fails as any other does: Prefect has to see the exception.
    """
    from prefect import get_run_logger
    from prefect.context import FlowRunContext
    from prefect.states import Failed

    @wraps(flow)
    def told_in_state(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return flow(*arguments, **named)
        except Exception as error:
            failure, context = told(error, ()), FlowRunContext.get()
            if failure is None or context is None or context.flow is None or context.flow.retries:
                raise
            get_run_logger().error("%s", failure[0], extra={SAID: True})
            setattr(error, SAID, True)
            for name in ("prefect.flow_runs", "prefect.engine"):  # a worker's engine would add the traceback
                logging.getLogger(name).addFilter(_is_news)
            return cast(R, Failed(message=failure[0], data=error))

    # Prefect evaluates annotations where the function that it is given was written.
    told_in_state.__signature__ = signature(flow, eval_str=True)  # type: ignore[attr-defined]
    return told_in_state


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and getattr(record.exc_info[1], SAID, False))


def told(error: Exception, arguments: Sequence[str]) -> tuple[str, int] | None:
    """Return the message and the exit code of a failure, notes included; None for a defect.

    Args:
        arguments: the command line, which says which paths the user named.
    """
    notes = getattr(error, "__notes__", ())
    if isinstance(error, UserError):
        return "\n  ".join([str(error), *notes]), MISTAKE
    if isinstance(error, FailedInWords):
        return "\n  ".join([str(error), *notes]), FAILURE
    if isinstance(error, OSError):
        if error.errno in FULL:
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}{os.strerror(int(error.errno))}; make room, or name a folder on another disk"
            return "\n  ".join([text, *notes]), FAILURE
        text = file_mistake(error, arguments)
        return ("\n  ".join([text, *notes]), MISTAKE) if text else None
    if type(error).__module__ not in OF_ENGINES:  # not imported to ask: it would delay every other message
        return None
    from penstock.engines.groups.group import EngineError, RankLost
    from penstock.engines.groups.hosts import HostFailed

    if isinstance(error, HostFailed):
        return "\n  ".join([f"host {error.host}:", *error.reason.strip().splitlines()[-LINES:], *notes]), FAILURE
    if not isinstance(error, EngineError | RankLost):
        return None
    return "\n  ".join([*_of_engine(error), *notes]), FAILURE


def file_mistake(error: OSError, arguments: Sequence[str]) -> str:
    """Say which file could not be used, if that is the user's to put right; else empty text.

    That is so for any file that this user may not touch, and for what is missing or of the wrong kind where the command
    line itself says so: a file that Penstock alone knows of is missing by a defect.
    """
    files = [os.fsdecode(name) for name in (error.filename2, error.filename) if isinstance(name, str | bytes)]
    if not files or not (error.errno in REFUSED or (error.errno in MISPLACED and _is_named(files, arguments))):
        return ""
    return f"{files[0]}: {error.strerror}\n  name another path, or put this one right"


def _is_named(files: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether one of the files is a path of the command line (`key=value` counts), or a folder above one."""
    values = [argument.rpartition("=")[2] for argument in arguments]
    named = [Path(value).absolute() for value in values if value]
    wanted = {place for path in named for place in (path, *path.parents)}
    return any(Path(file).absolute() in wanted for file in files)


def _of_engine(error: EngineError | RankLost) -> list[str]:
    """Return the lines that name group, rank, reason and log file, with the end of what the rank said."""
    from penstock.engines.groups.group import OutOfMemory, RankLost

    where = f"group {error.group}, rank {error.rank}"
    shown = slice(-LINES if error.log_file.is_file() else None, None)  # a benchmark's log is gone with its folder
    if not isinstance(error, RankLost):
        last = error.remote_traceback.strip().splitlines()[shown]
        return [f"{where}: '{error.command}' raised", *last, f"log: {error.log_file}"]
    reason, said = error.reason, error.log_tail.splitlines()
    if "SIGKILL" in reason:  # nobody can say a last word then
        reason, said = f"{reason}, out of memory?", []
    return [
        f"{where}: {reason}",
        *[line for line in said if not ROUTINE.search(line)][shown],
        *([LESS_MEMORY] if isinstance(error, OutOfMemory) or isinstance(error.__cause__, OutOfMemory) else []),
        f"log: {error.log_file}",
    ]
