"""Weights & Biases offline, its real library and process: a run, its resumes and kills are one W&B run.

Its files are read here as `wandb sync` uploads them: row by row, those of all attempts together.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from penstock.base.errors import UserError
from penstock.cli.runs.sync import sync
from penstock.engines.groups.environment import inherited
from penstock.session.record import append_record
from penstock.session.session import Training
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, truncate_metrics
from penstock.tasks.finetuning.record import record_warm_up
from penstock.tasks.iteration import record
from penstock.trackers.delivery import WARM_UP_LOSS
from penstock.trackers.table import check_trackers
from penstock.trackers.tracker import ITERATION, Figures, NewRun
from penstock.trackers.wandb import made_for
from penstock.trackers.wandb_records import STEP, _records, _values
from tests.delivering import await_delivery
from tests.processes import alive
from tests.trackers.test_added import ROOT, attempt, recorded_training
from tests.waiting import until

ENDS_S = 30.0


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key, and nothing of it outside the test's folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Training]:
    """Make a training that W&B records, or a later attempt at it."""
    return partial(recorded_training, tmp_path, monkeypatch, "wandb")


def files(run: RunFolder) -> list[Path]:
    """Those of all attempts at a run, the oldest first."""
    (tracked,) = read_manifest(run).tracked
    name = tracked.run.rpartition("/")[2]
    return sorted((run.path.parent / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """All rows that `wandb sync` would upload."""
    return rows_of(files(run))


def rows_of(paths: list[Path]) -> list[dict[str, Any]]:
    records = [record for path in paths for record in _records(path.read_bytes())]
    return [_values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]


def steps(run: RunFolder, figure: str) -> list[int]:
    return [row[STEP] for row in rows(run) if figure in row]


def processes() -> list[psutil.Process]:
    """W&B's, of this process."""
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "wandb-core"]


def test_a_run_and_its_resume_are_one_wandb_run(make: Callable[[], Training]) -> None:
    """Each figure once, the rows' numbers grow over both attempts' files. Control: it has a file of each."""
    training = make()
    truncate_metrics(training.run.warm_up, -1)
    record_warm_up.fn(training, 0, [{"loss": 3.0}, {"loss": 2.0}])
    with pytest.raises(ZeroDivisionError):
        attempt(training, 0, 1, 2, fails=True)
    assert processes() == [], "its process ends with the training"
    attempt(make(), 2, 3)
    run = training.run
    assert len(files(run)) == 2
    assert steps(run, "reward/mean") == steps(run, ITERATION) == [0, 1, 2, 3]
    assert steps(run, WARM_UP_LOSS) == [1, 2]
    assert [row["reward/mean"] for row in rows(run) if "reward/mean" in row] == [0.0, 0.1, 0.2, 0.3]
    numbers = [row["_step"] for row in rows(run)]
    assert numbers == sorted(set(numbers))
    assert steps(run, "samples._type") == [2]
    tracker = made_for(run.path.parent)
    assert tracker.find(read_manifest(run).tracked[0].run)
    assert tracker.status() == "completed"
    assert tracker._state().config["record.experiment"] == "adding"
    assert tracker._state().config["algorithm"] == "grpo", "a tag of the run"
    assert tracker._state().config["actor.optimizer.learning_rate"] > 0
    kept = files(run)[-1].parent / "files" / "penstock"
    assert (kept / "summary.json").read_text(encoding="utf-8") == run.summary.read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "online")  # a run that was begun offline is looked for there
        assert sync(run.path).endswith("held all of it already")


def test_offline_nothing_of_it_listens_and_nobody_is_asked(
    make: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has sockets in the file system alone, and no server is reached. Control: it has such sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        training = make()
        begun = made_for(training.run.path.parent)
        begun.open(NewRun("run", "exp", {}))
        begun.log([Figures(0, {"a": 0.5})])
        (process,) = processes()
        assert process.net_connections("inet") == []
        assert process.net_connections("unix")
        begun.close("completed", 0.0)
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.accept()


def test_signals_stay_the_trainings_own(tmp_path: Path) -> None:
    """Ctrl-C reaches the flow as ever, and not W&B's process, which is in a session of its own."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tracker = made_for(tmp_path)
    tracker.open(NewRun("run", "exp", {}))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    (process,) = processes()
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    tracker.close("cancelled", 0.0)
    assert tracker.status() == "cancelled"


KILLED = """
import os, sys, time
from pathlib import Path
import pytest
from tests.delivering import await_delivery
from tests.trackers.test_added import recorded_training
from penstock.tasks.iteration import record
from penstock.state.manifest import Progress
from penstock.tasks.iteration.checkpoint import begin_manifest

with pytest.MonkeyPatch.context() as patch:
    training = recorded_training(Path(sys.argv[1]), patch, "wandb")
    with training.session().consolidator, record.recording(training):
        for number in range(3):
            record.record.fn(training, number, {"reward/mean": number / 10})
        begin_manifest(training, Progress(iteration=1))
        await_delivery(training)
        print("killed from here", flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_no_process_and_its_resume_doubles_nothing(
    make: Callable[[], Training], tmp_path: Path
) -> None:
    """What W&B had not written comes once more. Control: its file lacked figures that it had been given."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    until(lambda: b"killed" in process.stdout.readline(), 60, "the training has recorded its iterations")
    (theirs,) = [child for child in psutil.Process(process.pid).children() if child.name() == "wandb-core"]
    process.kill()
    process.wait(ENDS_S)
    training = make()
    assert steps(training.run, "reward/mean") == [], "W&B writes in blocks"
    attempt(training, 2, 3)
    assert not alive(theirs)
    assert steps(training.run, "reward/mean") == steps(training.run, ITERATION) == [0, 1, 2, 3]


def test_a_training_outlives_its_process_and_sync_brings_the_rest(make: Callable[[], Training]) -> None:
    """Another process is begun; no figure is there twice. Control: before `penstock sync` the first one is missing."""
    training = make()
    with training.session().consolidator, record.recording(training):
        append_record(training, 1, {"reward/mean": 0.1})
        await_delivery(training)
        (process,) = processes()
        process.kill()
        process.wait(ENDS_S)
        append_record(training, 2, {"reward/mean": 0.2})
        await_delivery(training)
        (another,) = processes()
        assert another.pid != process.pid
    assert steps(training.run, "reward/mean") == [2]
    assert sync(training.run.path).endswith("now holds all of it")
    assert sorted(steps(training.run, "reward/mean")) == [1, 2]
    assert processes() == []


def test_rows_of_more_than_a_block_are_read_as_they_are(tmp_path: Path) -> None:
    """Records over several blocks, and many to a block. Control: their bytes are more than three blocks."""
    tracker = made_for(tmp_path)
    tracker.open(NewRun("run", "exp", {}))
    wide = {f"reward/part_{number}": number / 7 for number in range(500)}
    for step in range(12):
        tracker.log([Figures(step, wide if step % 4 == 0 else {"a": float(step)})])
    tracker.close("completed", 0.0)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 3 * 32768
    again = made_for(tmp_path)
    assert again.find(tracker.run)
    assert again.logged("reward/part_499") == {0, 4, 8}
    assert again.logged("a") == set(range(12)) - {0, 4, 8}
    for size in range(0, file.stat().st_size, 997):  # a file that was cut off anywhere is read up to there
        found = [record.num for record in _records(file.read_bytes()[:size])]
        assert found == list(range(1, len(found) + 1))


def test_figures_are_given_on_one_thread(make: Callable[[], Training], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own: the flow's thread leaves them and goes on. Control: there are such calls."""
    callers, log = Counter[str](), wandb.Run.log

    def noted(*arguments: Any, **named: Any) -> None:
        callers[threading.current_thread().name] += 1
        log(*arguments, **named)

    monkeypatch.setattr(wandb.Run, "log", noted)
    attempt(make(), 0, 1)
    assert set(callers) == {"tracker"}


def test_what_it_needs_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for its server, without a question at the terminal; a mode in which it records. Control: offline passes."""
    check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UserError, match="WANDB_MODE=disabled: the tracker 'wandb' has nothing to do"):
        check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="W&B has no API key"):
        check_trackers(["wandb"])


def test_ranks_do_not_get_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another of its variables is inherited."""
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    assert "WANDB_API_KEY" not in inherited()
    assert inherited()["WANDB_MODE"] == "offline"
