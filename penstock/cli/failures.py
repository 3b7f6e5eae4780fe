"""What the command line says of an exception that ends it: a sentence where there is one, else its traceback.

A note on the exception, such as how to go on, is part of it. Left out: a defect, of which the traceback tells more.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.errors import LogprobGapError, UserError

if TYPE_CHECKING:
    from engines.groups.group import EngineError, RankLost

MISTAKE, FAILURE = 2, 1  # exit codes
OF_ENGINES = ("engines.groups.group", "engines.groups.hosts")  # modules of their errors
LINES = 10  # of a log or a traceback; the log file has all of them
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
ROUTINE = re.compile(r"\b(DEBUG|INFO|WARNING)\b|Warning:")


def told(error: Exception, arguments: Sequence[str]) -> tuple[str, int] | None:
    """Return the message and the exit code of a failure, notes included; None for a defect.

    Args:
        arguments: the command line, which says which paths the user named.
    """
    notes = getattr(error, "__notes__", ())
    if isinstance(error, UserError):
        return "\n  ".join([str(error), *notes]), MISTAKE
    if isinstance(error, LogprobGapError):
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
    from engines.groups.group import EngineError, RankLost
    from engines.groups.hosts import HostFailed

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
    from engines.groups.group import RankLost

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
        f"log: {error.log_file}",
    ]
