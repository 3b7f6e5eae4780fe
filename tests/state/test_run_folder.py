"""A run folder is never mixed with another's, and its metrics survive a crash in the middle of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.state.run_folder import (
    RunFolder,
    append_metrics,
    check_free,
    drop_lost_experience,
    drop_partial,
    locked,
    new_run_folder,
    open_run_folder,
    read_metrics,
    truncate_metrics,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with three recorded iterations."""
    run = RunFolder(tmp_path)
    for iteration in (1, 2, 3):
        append_metrics(run, iteration, {"loss": iteration / 10})
    return run


# ---- folders -------------------------------------------------------------------------------------------------------


def test_two_runs_of_the_same_second_get_two_folders(tmp_path: Path) -> None:
    """Named after the recipe and the time; absolute, so that a rank with another working directory finds it."""
    folders = [new_run_folder(tmp_path / "runs", "quickstart") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        assert folder.path.is_dir()
        assert folder.path.is_absolute()
        assert folder.name.startswith("quickstart-")


def test_an_explicit_folder_may_be_new_or_empty(tmp_path: Path) -> None:
    """And is then exactly that one."""
    assert new_run_folder(tmp_path, "x", explicit=tmp_path / "a" / "b").path == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert new_run_folder(tmp_path, "x", explicit=tmp_path / "empty").path == tmp_path / "empty"


def test_a_folder_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Another run, other files, a file of that name: each says what it is. Nothing is written into it."""
    run, other, file = tmp_path / "run", tmp_path / "other", tmp_path / "file"
    for folder in (run, other):
        folder.mkdir()
    (run / "config.yaml").write_text("name: x")
    (other / "thesis.tex").write_text("")
    file.write_text("")
    for path, problem in ((run, "already holds a run"), (other, "not empty"), (file, "is a file")):
        with pytest.raises(UserError, match=problem):
            new_run_folder(tmp_path, "x", explicit=path)
    for manifest, remedy in ((False, "name another folder"), (True, f"continue it with '--resume {run}'")):
        if manifest:
            (run / "manifest.json").write_text("{}")
        with pytest.raises(UserError) as caught:
            check_free(run)
        assert caught.value.remedy.startswith(remedy)
    assert [entry.name for entry in other.iterdir()] == ["thesis.tex"]


def test_a_folder_without_a_run_cannot_be_opened(tmp_path: Path) -> None:
    """A typing error is found before engines start. Control: with its configuration it opens."""
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="holds no run"):
            open_run_folder(path)
    (tmp_path / "config.yaml").write_text("name: x")
    assert open_run_folder(tmp_path).path == tmp_path.resolve()


def test_paths_sort_by_iteration(tmp_path: Path) -> None:
    """Six digits: by name is by iteration, which pruning and people rely on."""
    run = RunFolder(tmp_path)
    assert run.experience(12) == tmp_path / "experience" / "000012.parquet"
    assert run.checkpoint(9).name < run.checkpoint(10).name < run.checkpoint(100_000).name
    assert run.evaluation(0).name == "000000.parquet"
    assert run.prompts("heldout").parent == tmp_path / "data"


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_come_back_in_order(run: RunFolder) -> None:
    """One record per iteration."""
    assert [record["iteration"] for record in read_metrics(run)] == [1, 2, 3]
    assert read_metrics(run)[1]["metrics"] == {"loss": 0.2}
    assert read_metrics(RunFolder(run.path / "elsewhere")) == []


@pytest.mark.parametrize("bytes_lost", [1, 5, 30])
def test_a_line_cut_by_a_crash_is_left_out(bytes_lost: int, run: RunFolder) -> None:
    """Also one that lacks only its line end. Control: uncut, all three are there."""
    assert len(read_metrics(run)) == 3
    run.metrics.write_bytes(run.metrics.read_bytes()[:-bytes_lost])
    assert [record["iteration"] for record in read_metrics(run)] == [1, 2]


def test_truncation_drops_later_iterations_and_the_cut_line(run: RunFolder) -> None:
    """What a resumed run records next then follows on a clean line."""
    run.metrics.write_bytes(run.metrics.read_bytes() + b'{"iteration": 4, "met')
    truncate_metrics(run, 2)
    append_metrics(run, 3, {"loss": 0.5})
    assert [(record["iteration"], record["metrics"]["loss"]) for record in read_metrics(run)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.5),
    ]


def test_later_figures_join_the_line_of_their_iteration(run: RunFolder) -> None:
    """One record per iteration as before, twice as well; a resume from there keeps them, from before drops them.

    What is in the file already is not written again, however long it is.
    """
    before = run.metrics.read_bytes()
    for size in (1.0, 2.0):
        append_metrics(run, 2, {"checkpoint/gib": size})
    assert run.metrics.read_bytes().startswith(before)
    assert [record["metrics"] for record in read_metrics(run)] == [
        {"loss": 0.1},
        {"loss": 0.2, "checkpoint/gib": 2.0},
        {"loss": 0.3},
    ]
    truncate_metrics(run, 2)
    assert read_metrics(run)[-1]["metrics"] == {"loss": 0.2, "checkpoint/gib": 2.0}
    truncate_metrics(run, 1)
    assert [record["metrics"] for record in read_metrics(run)] == [{"loss": 0.1}]


def test_later_figures_cut_by_a_crash_leave_the_earlier_ones(run: RunFolder) -> None:
    """The line of the iteration is complete. Control: uncut, they are there."""
    append_metrics(run, 3, {"checkpoint/gib": 1.0})
    assert read_metrics(run)[-1]["metrics"] == {"loss": 0.3, "checkpoint/gib": 1.0}
    run.metrics.write_bytes(run.metrics.read_bytes()[:-1])
    assert read_metrics(run)[-1] == {"iteration": 3, "metrics": {"loss": 0.3}}
    truncate_metrics(run, 3)
    append_metrics(run, 3, {"checkpoint/gib": 2.0})
    assert read_metrics(run)[-1]["metrics"] == {"loss": 0.3, "checkpoint/gib": 2.0}


def test_leftovers_of_a_crash_are_dropped(run: RunFolder) -> None:
    """Half-written files and folders, and experience of lost policies; what is complete and still of use stays."""
    for name in ("000001", "000004", "000005", "000005.values"):
        (run.experience(0).parent / f"{name}.parquet").parent.mkdir(exist_ok=True)
        (run.experience(0).parent / f"{name}.parquet").touch()
    (run.experience(0).parent / "000005.reference_states.npy").touch()
    (run.experience(0).parent / ".000004.parquet.77.partial").touch()
    (run.checkpoints / ".000003.partial" / "actor").mkdir(parents=True)
    (run.checkpoints / ".000003.partial" / ".sha256.json.77.partial").touch()
    (run.checkpoints / "000003").mkdir()
    drop_partial(run)
    drop_lost_experience(run, 3)
    assert sorted(path.name for path in run.experience(0).parent.iterdir()) == ["000001.parquet", "000004.parquet"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["000003"]
    assert len(read_metrics(run)) == 3


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    """A second process in a run folder is refused while the first writes, and not afterwards."""
    run = new_run_folder(tmp_path, "run")
    with locked(run), pytest.raises(UserError, match="another process"), locked(run):
        pass
    with locked(run):
        pass
