"""Consolidation: what the tasks of an iteration added to its experience becomes one file with it.

That takes as long as writing all columns (penstock/state/experience.py), so it happens in a thread of the session,
while the next iteration's rollout runs on the GPUs: from the record of an iteration on only people read its experience.
The manifest waits for it. So the experience of every iteration that is not done again is one file, also after a power
cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.state.experience import consolidate, with_parts

if TYPE_CHECKING:
    from penstock.session.session import Session


@contextmanager
def consolidating(session: Session) -> Iterator[None]:
    """Own the thread of a session; leave no experience in parts, however the session ends.

    Parts that a killed attempt left become one file with theirs first: a rollout among them need not be done again.
    """
    for path in _in_parts(session):
        consolidate(path)
    with session.consolidator:
        try:
            yield
        finally:
            finish_consolidation(session)


def begin_consolidation(session: Session, iteration: int) -> None:
    """Consolidate the experience of an iteration in the session's thread, once that of the one before is done.

    Raises:
        Exception: whatever ended that of the one before.
    """
    await_consolidation(session)
    session.consolidation = session.consolidator.submit(consolidate, session.run.experience(iteration))


def await_consolidation(session: Session) -> None:
    """Wait for the consolidation that was begun.

    Raises:
        Exception: whatever ended it.
    """
    begun, session.consolidation = session.consolidation, None
    if begun is not None:
        begun.result()


def finish_consolidation(session: Session) -> None:
    """Wait for the consolidation that was begun, and consolidate what else lies in parts.

    Raises:
        Exception: whatever ended one of them.
    """
    await_consolidation(session)
    for path in _in_parts(session):
        consolidate(path)


def _in_parts(session: Session) -> list[Path]:
    return with_parts(session.run.experience(0).parent)
