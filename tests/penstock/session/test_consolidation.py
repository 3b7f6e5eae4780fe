"""What tasks added to an experience becomes one file behind the iteration's back; no failure of it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from configs.schema import TrainConfig
from penstock.session import consolidation, session
from penstock.session.consolidation import begin_consolidation, finish_consolidation
from penstock.session.session import Session, Training, open_session
from penstock.state import experience
from penstock.state.experience import add_columns, column_names, consolidate, with_parts, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder
from tasks.iteration import checkpoint

MakeTraining = Callable[[TrainConfig], Training]


@pytest.fixture
def living(training_with: MakeTraining) -> Iterator[Session]:
    """The session of a training whose first three iterations lie in parts."""
    training = training_with(TrainConfig())
    in_parts(training.run, 1, 2, 3)
    with training.session().consolidator:
        yield training.session()


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session without models: none is needed to own a thread."""
    monkeypatch.setattr(session, "place", lambda *_: [])
    monkeypatch.setattr(session, "estimate_groups", lambda *_: [])


def in_parts(run: RunFolder, *iterations: int) -> None:
    for number in iterations:
        write_columns(run.experience(number), {"prompt": ["a", "b"]})
        add_columns(run.experience(number), {"reward": np.array([number, 0.5])})


def rewards(run: RunFolder, iteration: int) -> list[float]:
    """Return the rewards as whoever opens the file alone sees them."""
    return list(pd.read_parquet(run.experience(iteration))["reward"])


def damage(run: RunFolder, iteration: int) -> None:
    """Cut the part of an iteration's experience short."""
    (part,) = run.experience(iteration).parent.glob(f".{iteration:06d}.*.1.part")
    part.write_bytes(part.read_bytes()[:20])


def test_the_iteration_goes_on_meanwhile_and_the_next_one_waits(
    living: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun is not done; before the second is begun, the first is done; at the end all are, also what nobody began."""
    may_end, order = threading.Event(), []

    def slow(path: Path) -> None:
        assert may_end.wait(10)
        order.append(path.name)
        consolidate(path)

    monkeypatch.setattr(consolidation, "consolidate", slow)
    begin_consolidation(living, 1)
    assert order == []
    may_end.set()
    begin_consolidation(living, 2)
    assert order[0] == "000001.parquet"
    assert rewards(living.run, 1) == [1.0, 0.5]
    finish_consolidation(living)
    assert order == ["000001.parquet", "000002.parquet", "000003.parquet"]
    assert with_parts(living.run.experience(0).parent) == []
    assert rewards(living.run, 3) == [3.0, 0.5]


@pytest.mark.parametrize("then", [lambda living: begin_consolidation(living, 2), finish_consolidation])
def test_a_failure_comes_out_at_the_next_occasion(living: Session, then: Callable[[Session], None]) -> None:
    """At the record of the next iteration, or at the end. Control: undamaged, both go well."""
    begin_consolidation(living, 1)
    then(living)
    in_parts(living.run, 1)
    damage(living.run, 1)
    begin_consolidation(living, 1)
    with pytest.raises(pa.ArrowInvalid, match="Not an Arrow file"):
        then(living)


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_session_leaves_no_parts_however_it_ends(tmp_path: Path, error: type[BaseException] | None) -> None:
    """Those being consolidated, those of an iteration that failed; the error stays the one that ended it."""
    run, caught = RunFolder(tmp_path), None
    try:
        with open_session(TrainConfig(), run) as training:
            in_parts(run, 1, 2)
            begin_consolidation(training.session(), 1)
            if error:
                raise error
    except BaseException as raised:
        caught = type(raised)
    assert caught is error
    assert with_parts(run.experience(0).parent) == []
    assert [rewards(run, number) for number in (1, 2)] == [[1.0, 0.5], [2.0, 0.5]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("consolidation")]


@pytest.mark.usefixtures("no_engines")
def test_a_session_that_ends_well_fails_if_an_experience_is_damaged(tmp_path: Path) -> None:
    """Half of one does not pass for a whole."""
    run = RunFolder(tmp_path)
    with pytest.raises(pa.ArrowInvalid, match="Not an Arrow file"), open_session(TrainConfig(), run):
        in_parts(run, 1)
        damage(run, 1)


@pytest.mark.usefixtures("no_engines")
def test_parts_of_an_earlier_attempt_are_taken_over_when_a_session_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of before a restart of the machine go: it may have emptied them. What is in the file itself stays."""
    run = RunFolder(tmp_path)
    with monkeypatch.context() as before_the_restart:
        before_the_restart.setattr(experience, "_boot", lambda: "earlier")
        in_parts(run, 1)
        damage(run, 1)
    in_parts(run, 2)
    with open_session(TrainConfig(), run):
        assert with_parts(run.experience(0).parent) == []
    assert [column_names(run.experience(number)) for number in (1, 2)] == [["prompt"], ["prompt", "reward"]]
    assert rewards(run, 2) == [2.0, 0.5]


@pytest.mark.parametrize("slow", [True, False])
def test_the_manifest_waits_until_its_iteration_is_one_file(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """So no iteration that a resume takes for done lies in parts. Control: nothing waits where nothing was begun."""
    training, done = training_with(TrainConfig()), []

    def behind(path: Path) -> None:
        time.sleep(0.2)
        done.append("one file")

    monkeypatch.setattr(consolidation, "consolidate", behind)
    monkeypatch.setattr(checkpoint, "append_record", lambda *_: None)
    monkeypatch.setattr(checkpoint, "write_manifest", lambda *_: done.append("manifest"))
    with training.session().consolidator:
        if slow:
            begin_consolidation(training.session(), 1)
        checkpoint.save_checkpoint.fn(training, Progress(iteration=1))
    assert done == (["one file", "manifest"] if slow else ["manifest"])
