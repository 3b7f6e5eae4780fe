"""The outbox: what a tracker gets is delivered in the order in which it came about, on a thread of its own.

The run folder is the truth and a tracker a view of it. So no iteration waits for one: a task leaves what it has
recorded in the `Outbox` of each tracker, and a server that goes away is asked again now and then, while the training
goes on and other trackers get theirs. What it lacks at the end is in the run folder, from which it is delivered later
(`penstock sync`, and each resume). Left out: what is delivered, and that it is so once (penstock/trackers/delivery.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from penstock.trackers.delivery import Delivery

RETRY_S = 10.0
PATIENCE_S = 30.0  # at the end of a run

_logger = logging.getLogger(__name__)


class Outbox:
    """A thread that delivers one thing after the other, and begins again with the one that failed.

    Args:
        delivery: what it works with.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._finishing = self._left = False
        self._reason = ""
        # A daemon: a request that hangs keeps no process from ending.
        self._thread = threading.Thread(target=self._deliver, name="tracker", daemon=True)
        self._thread.start()

    def put(self, label: str, deliver: Callable[[], object]) -> None:
        """Have something delivered after all that was put before, and return at once.

        Args:
            label: what it is, for people.
        """
        with self._changed:
            self._waiting.append((label, deliver))
            self._changed.notify_all()

    def finish(self, patience_s: float = PATIENCE_S) -> str:
        """Wait until all is delivered, an attempt fails or patience ends; say what is not, empty if nothing is."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left, patience_s)
            self._left = True
            if not self._waiting:
                return ""
            reason = self._reason or f"no answer for {patience_s:g} s"
            return f"{self._where} lacks this run from {self._waiting[0][0]} on: {reason}"

    @property
    def _where(self) -> str:
        return f"{self.delivery.tracker.label} ({self.delivery.tracker.address})"

    def _deliver(self) -> None:
        for label, deliver, last in self._attempts():
            try:
                deliver()
            except Exception as error:  # whatever it is: the training and its folder do not depend on it
                self.delivery.forget()
                self._failed(label, error, last)
            else:
                self._delivered()
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _attempts(self) -> Iterator[tuple[str, Callable[[], object], bool]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._finishing)
                if self._left or not self._waiting:
                    return
                label, deliver = self._waiting[0]
                last = self._finishing
            yield label, deliver, last

    def _delivered(self) -> None:
        with self._changed:
            self._waiting.popleft()
            if self._reason:
                _logger.warning("%s answers again and gets what it lacks", self.delivery.tracker.label)
            self._reason = ""

    def _failed(self, label: str, error: Exception, last: bool) -> None:
        """Wait before the next attempt; the one that was begun at the end of the run is the last."""
        with self._changed:
            if not self._reason:
                said = "%s does not take %s: the training goes on, and %s gets it later. %s"
                _logger.warning(said, self._where, label, self.delivery.tracker.label, _short(error))
            self._reason = _short(error)
            self._left = self._left or last
            self._changed.wait_for(lambda: self._finishing, RETRY_S)


def finish_all(outboxes: Sequence[Outbox], patience_s: float = PATIENCE_S) -> list[str]:
    """Finish every outbox within one patience, in which they go on side by side; return what is not delivered."""
    deadline = time.monotonic() + patience_s
    said = [outbox.finish(max(0.0, deadline - time.monotonic())) for outbox in outboxes]
    return [lacking for lacking in said if lacking]


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
