"""Keeps Prefect from printing tracebacks for a user's mistake: the command line prints its message instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from configs.errors import UserError

LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def _is_no_user_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, UserError) and "UserError" not in record.getMessage()


@contextmanager
def without_tracebacks_of_user_errors() -> Iterator[None]:
    """Drop Prefect's log records about a `UserError` while the context lasts."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_no_user_error)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(_is_no_user_error)
