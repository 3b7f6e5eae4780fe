"""TensorBoard as a tracker: a run's events lie in `tensorboard/` of its folder, in TensorBoard's own format.

Events are only ever appended, each attempt to a file of its own, which TensorBoard shows as one run. What a run holds
is read from these files, so a resume neither doubles nor loses a figure: of a file that was cut off the whole records
count. The library's framing and summaries are used and its writer is not: that one writes on a further thread, which
tells of an error at a later call.

Left out: report, events and other files, which lie beside the events anyway; models; histograms; TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock.base.errors import UserError
from penstock.trackers.tracker import ITERATION, Artifact, Figures, Model, NewRun, Pages, Status, Table

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = "tensorboard"

_CONFIG, _STATUS, _TAGS = "config", "status", "tags"
_RUNNING = "running"
_ENDS: dict[Status, str] = {"completed": "STATUS_SUCCESS", "failed": "STATUS_FAILURE", "cancelled": "STATUS_FAILURE"}


class TensorBoardTracker:
    """A run whose events lie in its folder.

    Args:
        runs: directory of the run folders.
    """

    label, page = "TensorBoard", ""

    def __init__(self, runs: Path) -> None:
        self._runs, self.run = runs.resolve(), ""
        self._figures: dict[str, set[int]] | None = None  # steps by figure; None: the files are to be asked
        self._texts: dict[str, dict[int, str]] = {}  # by tag and step
        self._writer: RecordWriter | None = None

    @property
    def address(self) -> str:
        return str(self._folder if self.run else self._runs)

    @property
    def _folder(self) -> Path:
        return self._runs / self.run / FOLDER

    def open(self, new: NewRun) -> str:
        self.run = new.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._text(_TAGS, 0, _bullets(new.tags))
        self.resume()
        return self.run

    def find(self, run: str) -> bool:
        self.run, self._figures = run, None
        return self._folder.is_dir()

    def resume(self) -> None:
        self._note_status(_RUNNING)

    def configure(self, settings: Mapping[str, str]) -> bool:
        """Keep settings as a text, and for TensorBoard's table of hyperparameters."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        text, held = _bullets(settings), self._held(_CONFIG)
        if held and held[max(held)] == text:
            return False
        self._text(_CONFIG, max(held, default=-1) + 1, text)
        self._write(hparams_pb({name: _plain(value) for name, value in settings.items()}, trial_id=self.run))
        return True

    def log(self, figures: Sequence[Figures]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._ask()
        for item in figures:
            summary = Summary()
            for name, value in item.values.items():
                summary.MergeFrom(scalar_pb(name, value))
            self._write(summary, item.step)
            assert self._figures is not None
            for name in item.values:
                self._figures.setdefault(name, set()).add(item.step)

    def logged(self, figure: str) -> set[int]:
        return set(self._ask().get(figure, ()))

    def logged_through(self) -> int:
        return max(self.logged(ITERATION), default=-1)

    def table(self, table: Table) -> None:
        """Keep a table as a text at its step, unless it is there."""
        if not self._holds(table):
            self._text(*_place(table.name), _markdown(table))

    def artifact(self, artifact: Artifact) -> None:
        """Keep nothing: it lies in the run folder, beside the events."""

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        """Return the names of tables that are not there as these files are; other files are not kept."""
        return {name for name, path in files.items() if _is_table(name) and not self._holds(Table(name, path))}

    def _holds(self, table: Table) -> bool:
        tag, step = _place(table.name)
        return self._held(tag).get(step) == _markdown(table)

    def model(self, model: Model) -> str | None:
        return None

    def status(self) -> Status | None:
        held = self._held(_STATUS)
        said = held[max(held)] if held else _RUNNING
        return next((status for status in _ENDS if status == said), None)

    def close(self, status: Status, at_s: float) -> None:
        self._write(_session_end(status, at_s), at_s=at_s)
        self._note_status(status, at_s)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _note_status(self, said: str, at_s: float | None = None) -> None:
        self._text(_STATUS, max(self._held(_STATUS), default=-1) + 1, said, at_s)

    def _text(self, tag: str, step: int, text: str, at_s: float | None = None) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._ask()
        self._write(text_pb(tag, text), step, at_s)
        self._texts.setdefault(tag, {})[step] = text

    def _held(self, tag: str) -> dict[int, str]:
        self._ask()
        return self._texts.get(tag, {})

    def _ask(self) -> dict[str, set[int]]:
        """Read what the files hold, unless this process knows."""
        if self._figures is None:
            self._figures, self._texts = {}, {}
            for step, value in _values(self._folder):
                if value.metadata.plugin_data.plugin_name == "scalars":
                    self._figures.setdefault(value.tag, set()).add(step)
                elif value.metadata.plugin_data.plugin_name == "text":
                    self._texts.setdefault(value.tag, {})[step] = value.tensor.string_val[0].decode()
        return self._figures

    def _write(self, summary: Summary, step: int = 0, at_s: float | None = None) -> None:
        """Append a record, as a whole; after a failure the files are asked, and the next record begins another."""
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if at_s is None else at_s, step=step, summary=summary)
        try:
            self._writer = self._writer or _begun(self._folder)
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError:
            self._writer, self._figures = None, None
            raise


def _session_end(status: Status, at_s: float) -> Summary:
    """Return the end of a run for the table of hyperparameters; the library's own function imports TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=getattr(api_pb2, _ENDS[status]), end_time_secs=at_s)
    about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=end))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _begun(folder: Path) -> RecordWriter:
    """Begin a file of events, of a name that sorts after those before."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    seconds, rest = divmod(time.time_ns(), 1_000_000_000)  # files are read in the order of their names
    name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
    writer = RecordWriter((folder / name).open("xb"))
    writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    return writer


def _values(folder: Path) -> Iterator[tuple[int, Summary.Value]]:
    """Return the values of all files in a folder with their steps, file by file as they were begun."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            yield from ((event.step, value) for value in event.summary.value)


def _is_table(name: str) -> bool:
    return PurePosixPath(name).stem.isdecimal()


def _place(name: str) -> tuple[str, int]:
    """Return the tag and the step of a table.

    >>> _place("samples/000012.json")
    ('samples', 12)
    """
    path = PurePosixPath(name)
    return str(path.parent), int(path.stem)


def _markdown(table: Table) -> str:
    """Return a table in Markdown, each row on one line."""
    rows = table.rows()
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """Return a value as a cell in which no character of Markdown means anything.

    >>> _cell("a|b\\n*c*")
    'a&#124;b<br>&#42;c&#42;'
    """
    if not isinstance(value, str) or value == "---":
        return str(value)
    escaped = "".join(f"&#{ord(char)};" if char in "&<>|*_`[]()#~\\" else char for char in value)
    return escaped.replace("\n", "<br>")


def _bullets(values: Mapping[str, str]) -> str:
    return "\n".join(f"- `{name}`: {_cell(value)}" for name, value in values.items())


def _plain(value: str) -> str | float | bool:
    """Return a setting as TensorBoard's filters want it: numbers as numbers."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, bool | int | float) else value


def made_for(folder: Path) -> TensorBoardTracker:
    """Return the tracker for the runs in a directory."""
    return TensorBoardTracker(folder)


def installed() -> None:
    """Refuse where TensorBoard is not installed.

    Raises:
        UserError: says how to install it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("the tracker 'tensorboard' needs TensorBoard", "pip install 'penstock[trackers]'")


def pages(folder: Path, port: int) -> Pages | None:
    """Return TensorBoard's pages of the runs in a directory; None where none has events."""
    if importlib.util.find_spec("tensorboard") is None or next(folder.glob(f"*/{FOLDER}/events*"), None) is None:
        return None
    module = ["tensorboard.main", "--logdir", str(folder.resolve()), "--host", "127.0.0.1", "--port", str(port)]
    return Pages(TensorBoardTracker.label, f"http://127.0.0.1:{port}", module, {"PYTHONWARNINGS": "ignore"})
