"""TensorBoard gets a run and its resume as one, each figure once; what it holds is read here by TensorBoard itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from penstock.base.errors import UserError
from penstock.cli.runs.sync import sync
from penstock.engines.groups.interface import free_port
from penstock.session.session import Training
from penstock.state.run_folder import RunFolder, truncate_metrics
from penstock.tasks.finetuning.record import record_warm_up
from penstock.trackers.delivery import WARM_UP_LOSS
from penstock.trackers.table import check_trackers
from penstock.trackers.tensorboard import FOLDER, TensorBoardTracker, pages
from penstock.trackers.tracker import ITERATION, Figures, NewRun, Pages, Table
from tests.trackers.test_added import ROOT, attempt, recorded_training
from tests.waiting import until

SERVER_S = 60.0


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Training]:
    """Make a training that TensorBoard records, or a later attempt at it."""
    return partial(recorded_training, tmp_path, monkeypatch, "tensorboard")


def shown(run: RunFolder) -> EventAccumulator:
    """Return what TensorBoard shows of a run, all of it."""
    everything = {"scalars": 0, "tensors": 0, "compressedHistograms": 0, "images": 0, "audio": 0}
    return EventAccumulator(str(run.path / FOLDER), size_guidance=everything).Reload()


def steps(run: RunFolder, figure: str) -> list[int]:
    return [event.step for event in shown(run).Tensors(figure)] if figure in shown(run).Tags()["tensors"] else []


def texts(run: RunFolder, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in shown(run).Tensors(tag)]


def resumed(make: Callable[[], Training]) -> RunFolder:
    """A run that failed after iteration 2 and went on from 1 to 3."""
    training = make()
    truncate_metrics(training.run.warm_up, -1)
    record_warm_up.fn(training, 0, [{"loss": 3.0}, {"loss": 2.0}])
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    attempt(make(), 2, 3)
    return training.run


def test_a_run_and_its_resume_are_one_with_each_figure_once(make: Callable[[], Training]) -> None:
    """Figures, the table of samples, settings, how it ended. Control: there are two files, one of each attempt."""
    run = resumed(make)
    assert len(list((run.path / FOLDER).iterdir())) == 2
    assert steps(run, "reward/mean") == steps(run, ITERATION) == [0, 1, 2, 3]
    assert steps(run, WARM_UP_LOSS) == [1, 2]
    values = [event.tensor_proto.float_val[0] for event in shown(run).Tensors("reward/mean")]
    assert values == pytest.approx([0.0, 0.1, 0.2, 0.3])
    (table,) = texts(run, "samples")
    assert table.splitlines()[0] == "| sample&#95;id | prompt | response | reward | policy&#95;version |"
    assert steps(run, "samples") == [2]
    assert texts(run, "status") == ["running", "failed", "running", "completed"]
    (settings,) = texts(run, "config")
    assert "- `record.experiment`: adding" in settings
    started = shown(run).SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    hyperparameters = metadata.parse_session_start_info_plugin_data(started).hparams
    assert hyperparameters["actor.optimizer.learning_rate"].number_value > 0
    ended = shown(run).SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    assert metadata.parse_session_end_info_plugin_data(ended).status


@pytest.mark.parametrize("cut", [10, 500, 5000])
def test_of_a_file_that_was_cut_off_what_is_whole_counts(make: Callable[[], Training], cut: int) -> None:
    """A kill in the middle of a record: it comes once more, nothing else does. Control: uncut, nothing is lacking."""
    training = make()
    attempt(training, 0, 1, 2)
    run = training.run
    assert sync(run.path).endswith("held all of it already")
    (file,) = (run.path / FOLDER).iterdir()
    os.truncate(file, file.stat().st_size - cut)
    assert sync(run.path).endswith("now holds all of it")
    assert steps(run, "reward/mean") == steps(run, ITERATION) == [0, 1, 2]
    assert texts(run, "status")[-1] == "completed"


def test_a_disk_that_was_full_costs_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a record was written. Control: what came before is not written again."""
    tracker = TensorBoardTracker(tmp_path)
    tracker.open(NewRun("run", "exp", {}))
    tracker.log([Figures(0, {"a": 0.5})])
    write = RecordWriter.write

    def full(writer: Any, data: bytes) -> None:
        write(writer, data)
        writer._writer.flush()
        os.truncate(writer._writer.name, Path(writer._writer.name).stat().st_size - 3)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(RecordWriter, "write", full)
        tracker.log([Figures(1, {"a": 0.6})])
    assert tracker.logged("a") == {0}
    tracker.log([Figures(1, {"a": 0.7})])
    assert steps(RunFolder(tmp_path / "run"), "a") == [0, 1]


def test_what_people_write_is_no_markup(tmp_path: Path) -> None:
    """A response may hold tables, tags and lines. Control: it is shown as it is."""
    rows = {"columns": ["response", "reward"], "data": [["a|b\n<img src=x> `c` [d](e)", 0.5]]}
    path = tmp_path / "000007.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    tracker = TensorBoardTracker(tmp_path)
    tracker.open(NewRun("run", "exp", {}))
    table = Table("samples/000007.json", path)
    assert tracker.lacking({table.name: path}) == {table.name}
    tracker.table(table)
    assert tracker.lacking({table.name: path}) == set()
    (text,) = texts(RunFolder(tmp_path / "run"), "samples")
    assert len(text.splitlines()) == 3
    assert text.count("|") == 9
    assert not {"<img", "`", "["} & set(text)


PROGRAM = """
import sys
from pathlib import Path
from penstock.trackers.table import make_tracker
from penstock.trackers.tracker import Figures, NewRun
tracker = make_tracker("tensorboard", Path(sys.argv[1]))
tracker.open(NewRun("run", "exp", {}))
tracker.configure({"a": "1"})
tracker.log([Figures(0, {"a": 0.5})])
tracker.close("completed", 0.0)
again = make_tracker("tensorboard", Path(sys.argv[1]))
print(again.find("run"), again.logged("a"), sorted({"torch", "tensorflow"} & set(sys.modules)))
"""


def test_its_library_brings_no_torch_and_no_tensorflow(tmp_path: Path) -> None:
    """Writing and reading, in a process of its own. Control: both were done there."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True {0} []\n"


def test_where_it_is_not_installed_one_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts. Control: where it is, the check passes."""
    check_trackers(["tensorboard"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs TensorBoard\n  pip install 'penstock\[trackers\]'"):
        check_trackers(["tensorboard"])


@pytest.mark.slow
def test_its_pages_show_each_figure_once(make: Callable[[], Training]) -> None:
    """Of the server that `penstock ui` starts, whose reader is another. Control: there is no page without events."""
    run = resumed(make)
    port = free_port("127.0.0.1")
    assert pages(run.path, port) is None
    there = pages(run.path.parent, port)
    assert there is not None
    with served(there):
        about = f"http://127.0.0.1:{port}/data/plugin/timeseries/tags"
        until(lambda: "reward/mean" in answer(about), SERVER_S, "TensorBoard has read the events")
        request = json.dumps([{"plugin": "scalars", "tag": "reward/mean"}])
        found = answer(f"http://127.0.0.1:{port}/data/plugin/timeseries/timeSeries", requests=request)
    (series,) = json.loads(found)[0]["runToSeries"].values()
    assert [(point["step"], point["value"]) for point in series] == [
        (step, pytest.approx(step / 10)) for step in (0, 1, 2, 3)
    ]


@contextmanager
def served(pages: Pages) -> Iterator[None]:
    """Keep a server as `penstock ui` starts it for the length of a block."""
    command, settings = [sys.executable, "-m", *pages.module], os.environ | dict(pages.environment)
    server = subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.terminate()
        server.wait(30)


def answer(address: str, **fields: str) -> str:
    """Return what a page answers, empty while there is no server."""
    data = urllib.parse.urlencode(fields).encode() if fields else None
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=10) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""
