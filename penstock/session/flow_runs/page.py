"""The page of a training's flow run in Prefect: its tags, how far it is, each evaluation and samples as tables.

The page is a view: nothing waits for it, and what its server does not take is missing there alone. A thread of its own
makes the requests. Progress is one artifact that is renewed: the newest text wins, and quick iterations renew it every
few seconds, since each request is a write in the database that also opens the next child flow.

Left out: links and pages that are made once (penstock/tasks/iteration/record.py), and lines of the log (progress.py).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from penstock.reports.evaluation import how_sampled, shown, with_interval
from penstock.reports.headline import duration

CHARACTERS = 1_000  # of a text in a table
EVERY_S = 5.0  # between two renewals of the progress
PATIENCE_S = 10.0  # at the end
PACE = 10  # iterations whose mean is the pace
PROGRESS, HELDOUT, SAMPLES = "progress", "held-out", "samples"  # keys of artifacts

_OF_FILE = re.compile(r"^!?\[[^\]]*\]\((?!\w+://).*\n+", re.MULTILINE)
_LINES = re.compile(r"\r\n|[\n\r]")  # the end of a paragraph would end the span
_logger = logging.getLogger(__name__)
Work = Callable[[SyncPrefectClient], object]


class Page:
    """What a flow run's page shows of its training; methods return at once.

    Args:
        flow_run_id: of the training.
        every_s: least seconds between two renewals of the progress.
    """

    def __init__(self, flow_run_id: str, every_s: float = EVERY_S) -> None:
        self._flow_run, self._every_s = UUID(flow_run_id), every_s
        self._work, self._closing = SimpleQueue[Work | None](), threading.Event()
        self._newest: tuple[float, str] | None = None
        self._asked, self._lock = False, threading.Lock()
        self._progress: UUID | None = None
        self._sent_s = -float("inf")
        self._total = self._done = 0
        self._ends: deque[float] = deque(maxlen=PACE + 1)
        self._figures: dict[str, str] = {}
        # In a copy of this context, since Prefect keeps there which server it talks to. A daemon: a request that hangs
        # keeps no process from ending.
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._send,), name="prefect-page", daemon=True)
        self._thread.start()

    def start(self, total: int, done: int) -> None:
        """Begin the iterations, `done` of them already behind; again after a recovery."""
        self._total, self._done = total, done
        self._ends.clear()
        self._ends.append(time.monotonic())
        self._renew()

    def advance(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show that an iteration has ended with `metrics`, and an evaluation if they hold one."""
        if iteration:
            self._done = iteration
            self._ends.append(time.monotonic())
        if "reward/mean" in metrics:
            self._figures["reward"] = f"reward {metrics['reward/mean']:.3f}"
        if "heldout/accuracy" in metrics:
            how = ", ".join(text for text in (how_sampled(metrics), f"after iteration {iteration}") if text)
            self._figures["heldout"] = f"held-out accuracy {metrics['heldout/accuracy']:.1%} ({how})"
            rows = [{"figure": label, "value": with_interval(metrics, name)} for name, label in shown(metrics).items()]
            self._table(HELDOUT, rows, f"Held-out prompts {how}; figures with their 95 % interval")
        if iteration:
            self._renew()

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]], command: str) -> None:
        """Add a table of samples; what a model was given and wrote stands in it as it is.

        Args:
            command: shows all of them.
        """
        texts = [dict(row) | {name: verbatim(row[name]) for name in ("prompt", "response")} for row in rows]
        self._table(SAMPLES, texts, f"Samples of iteration {iteration}; all of them: `{command}`")

    def _table(self, key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        artifact = ArtifactCreate(
            key=key, type="table", data=json.dumps(list(rows)), description=description, flow_run_id=self._flow_run
        )
        self._work.put(lambda client: client.create_artifact(artifact))

    def close(self) -> None:
        """Send what waits, for ten seconds at most; where iterations are left, the progress says that it ends here."""
        self._closing.set()
        if self._done < self._total:
            self._renew()
        self._work.put(None)
        self._thread.join(PATIENCE_S)

    def _renew(self) -> None:
        with self._lock:
            self._newest = (100 * self._done / max(1, self._total), self._text())
            asked, self._asked = self._asked, True
        if not asked:
            self._work.put(self._send_progress)

    def _text(self) -> str:
        ended = self._closing.is_set() and self._done < self._total
        begins = "Ended after iteration" if ended else "Iteration"
        said = [
            f"**{begins} {self._done:,} of {self._total:,}**",
            *(self._figures[name] for name in ("reward", "heldout") if name in self._figures),
        ]
        if len(self._ends) > 1:
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            said.append(f"{pace:.1f} s per iteration")
            if (left := self._total - self._done) and not ended:
                said.append(f"about {duration(left * pace)} left")
        return " · ".join(said)

    def _send(self) -> None:
        while True:
            try:
                with get_client(sync_client=True) as client:
                    while (work := self._work.get()) is not None:
                        work(client)
                return
            except Exception as error:  # whatever it is, the run folder has what the page lacks
                _logger.warning("the training's page in Prefect lacks something: %s", error)

    def _send_progress(self, client: SyncPrefectClient) -> None:
        self._closing.wait(max(0.0, self._sent_s + self._every_s - time.monotonic()))
        with self._lock:
            newest, self._newest, self._asked = self._newest, None, False
        assert newest is not None
        self._sent_s, (share, text) = time.monotonic(), newest
        if self._progress is None:
            artifact = ArtifactCreate(
                key=PROGRESS, type="progress", data=share, description=text, flow_run_id=self._flow_run
            )
            self._progress = client.create_artifact(artifact).id
        else:
            client.update_artifact(self._progress, ArtifactUpdate(data=share, description=text))


def verbatim(text: str) -> str:
    """Return text as a span of code of Markdown: Prefect's pages would load an image and follow a link in a cell."""
    if len(text) > CHARACTERS:
        text = f"{text[:CHARACTERS]} [... {len(text) - CHARACTERS:,} characters]"
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {_LINES.sub(' ↵ ', text)} {fence}"


def without_files(report: str) -> str:
    """Return a report without its lines that show or link a file beside it: Prefect's pages have no such file."""
    return _OF_FILE.sub("", report)


@contextmanager
def page_of(flow_run_id: str | None) -> Iterator[Page | None]:
    """Keep the page of a flow run going while the context lasts; None outside a flow run."""
    if flow_run_id is None:
        yield None
        return
    page = Page(flow_run_id)
    try:
        yield page
    finally:
        page.close()
