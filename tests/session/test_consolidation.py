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

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.hosts import Hosts
from penstock.session import consolidation, session
from penstock.session.consolidation import Consolidator
from penstock.session.machines.hosts import Machines
from penstock.session.session import Training, open_session
from penstock.state import experience
from penstock.state.experience import add_columns, column_names, consolidate, with_parts, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder
from penstock.tasks.iteration import checkpoint

MakeTraining = Callable[[TrainConfig], Training]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def consolidator(run: RunFolder) -> Iterator[Consolidator]:
    """That of a run whose first three iterations come to lie in parts."""
    with Consolidator(run.experience(0).parent) as opened:
        in_parts(run, 1, 2, 3)
        yield opened


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session without models: none is needed to own a thread."""
    monkeypatch.setattr(session, "place", lambda *_: [])


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
    run: RunFolder, consolidator: Consolidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun is not done; before the second is begun, the first is done; at the end all are, also what nobody began."""
    may_end, order = threading.Event(), []

    def slow(path: Path) -> None:
        assert may_end.wait(10)
        order.append(path.name)
        consolidate(path)

    monkeypatch.setattr(consolidation, "consolidate", slow)
    consolidator.begin(run.experience(1))
    assert order == []
    may_end.set()
    consolidator.begin(run.experience(2))
    assert order[0] == "000001.parquet"
    assert rewards(run, 1) == [1.0, 0.5]
    consolidator.finish()
    assert order == ["000001.parquet", "000002.parquet", "000003.parquet"]
    assert with_parts(run.experience(0).parent) == []
    assert rewards(run, 3) == [3.0, 0.5]


@pytest.mark.parametrize("then", ["the next one", "the manifest", "the end"])
def test_a_failure_comes_out_at_the_next_occasion(run: RunFolder, consolidator: Consolidator, then: str) -> None:
    """At the record of the next iteration, before the manifest, or at the end. Control: undamaged, all go well."""
    occasions: dict[str, Callable[[], None]] = {
        "the next one": lambda: consolidator.begin(run.experience(2)),
        "the manifest": consolidator.wait,
        "the end": consolidator.finish,
    }
    consolidator.begin(run.experience(1))
    occasions[then]()
    in_parts(run, 1)
    damage(run, 1)
    consolidator.begin(run.experience(1))
    with pytest.raises(pa.ArrowInvalid, match="Not an Arrow file"):
        occasions[then]()
    in_parts(run, 1)


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_session_leaves_no_parts_however_it_ends(run: RunFolder, error: type[BaseException] | None) -> None:
    """Those being consolidated, those of an iteration that failed; the error stays the one that ended it."""
    caught = None
    try:
        with Hosts(run.logs) as hosts, open_session(TrainConfig(), run, [], Machines(hosts)) as training:
            in_parts(run, 1, 2)
            training.session().consolidator.begin(run.experience(1))
            if error:
                raise error
    except BaseException as raised:
        caught = type(raised)
    assert caught is error
    assert with_parts(run.experience(0).parent) == []
    assert [rewards(run, number) for number in (1, 2)] == [[1.0, 0.5], [2.0, 0.5]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("consolidation")]


@pytest.mark.usefixtures("no_engines")
def test_a_session_that_ends_well_fails_if_an_experience_is_damaged(run: RunFolder) -> None:
    """Half of one does not pass for a whole."""
    with (
        Hosts(run.logs) as hosts,
        pytest.raises(pa.ArrowInvalid, match="Not an Arrow file"),
        open_session(TrainConfig(), run, [], Machines(hosts)),
    ):
        in_parts(run, 1)
        damage(run, 1)


@pytest.mark.usefixtures("no_engines")
def test_parts_of_an_earlier_attempt_are_taken_over_when_a_session_opens(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of before a restart of the machine go: it may have emptied them. What is in the file itself stays."""
    with monkeypatch.context() as before_the_restart:
        before_the_restart.setattr(experience, "_boot", lambda: "earlier")
        in_parts(run, 1)
        damage(run, 1)
    in_parts(run, 2)
    with Hosts(run.logs) as hosts, open_session(TrainConfig(), run, [], Machines(hosts)):
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
    training.session().snapshots = False
    with training.session().consolidator:
        if slow:
            training.session().consolidator.begin(training.run.experience(1))
        checkpoint.save_checkpoint.fn(training, Progress(iteration=1))
    assert done == (["one file", "manifest"] if slow else ["manifest"])
