"""Consolidation: what the tasks of an iteration added to its experience becomes one file with it.

Consolidation takes as long as writing all columns (penstock/state/experience.py), so it happens in a thread while the
next iteration's rollout runs on the GPUs: after the record of an iteration only people read its experience. The
manifest waits for it. So the experience of every iteration that is not repeated is one file, also after a power cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.state.experience import consolidate, with_parts

_logger = logging.getLogger(__name__)


class Consolidator:
    """A thread that consolidates the experience in a folder, one file at a time; as a context it leaves none in parts.

    Args:
        folder: of the experience files of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "consolidation")
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        """Consolidate the files that a killed attempt left in parts, so that a rollout among them is not repeated."""
        self._consolidate_rest()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._thread:
            try:
                self.finish()
            except OSError as why:  # parts are experience as well, and a resume begins with them
                _logger.warning("experience stays in parts: %s", why)

    def begin(self, path: Path) -> None:
        """Consolidate an experience file in the thread, once the one begun before is done.

        Raises:
            Exception: whatever ended the one before.
        """
        self.wait()
        self._begun = self._thread.submit(consolidate, path)

    def begun(self) -> Callable[[], None]:
        """Return what waits for that which is under way now, whatever is begun later; raises as `wait`."""
        begun = self._begun
        return (lambda: None) if begun is None else begun.result

    def wait(self) -> None:
        """Wait for what was begun.

        Raises:
            Exception: whatever ended it.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def finish(self) -> None:
        """Wait for what was begun, and consolidate what else lies in parts.

        Raises:
            Exception: whatever ended one of them.
        """
        self.wait()
        self._consolidate_rest()

    def _consolidate_rest(self) -> None:
        for path in with_parts(self._folder):
            consolidate(path)
