"""The manifest names only what is complete, and a damaged checkpoint is refused, not loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.base.files import empty_beside
from penstock.state import manifest as manifest_module
from penstock.state.digests import Damaged, write_sealed
from penstock.state.manifest import (
    Manifest,
    Progress,
    Tracked,
    completed,
    ended,
    prune_checkpoints,
    read_manifest,
    reopen,
    seal_checkpoint,
    verify_checkpoint,
    write_manifest,
)
from penstock.state.run_folder import RunFolder, append_metrics

MANIFEST = Manifest(
    progress=Progress(iteration=12, policy_version=12, prompt_cursor=768, kl_coefficient=0.02, overrides={"a.b": 1}),
    checkpoint="000012",
    model="models/initial",
    tracked=(Tracked("mlflow", "abc"),),
    kind="train",
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with room for checkpoints."""
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    return run


def _write_aside(run: RunFolder, name: str = "000012") -> Path:
    return _fill(run.checkpoints / f".{name}.partial")


def _fill(aside: Path) -> Path:
    aside.mkdir(parents=True, exist_ok=True)
    (aside / "state-main-0.safetensors").write_bytes(bytes(range(256)))
    (aside / "state-main-1.safetensors").write_bytes(b"state")
    return aside


def _sealed(run: RunFolder, name: str = "000012") -> Path:
    seal_checkpoint(_write_aside(run, name), run.checkpoints / name, run, _named(name))
    return run.checkpoints / name


def _named(name: str) -> Manifest:
    return dataclasses.replace(MANIFEST, checkpoint=name)


# ---- the manifest --------------------------------------------------------------------------------------------------


def test_the_manifest_comes_back_as_it_was_written(run: RunFolder) -> None:
    """Every field, progress included; the file names its format."""
    write_manifest(run, MANIFEST)
    assert read_manifest(run) == MANIFEST
    assert json.loads(run.manifest.read_text())["format"] == manifest_module.FORMAT


def test_a_run_is_complete_only_when_nothing_is_left_to_do(run: RunFolder) -> None:
    """Iterations, export and summary, each alone missing, leave something to resume for."""
    write_manifest(run, MANIFEST)
    assert not completed(run, 12)
    run.model("final").mkdir(parents=True)
    assert not completed(run, 12)
    run.summary.write_text('{"status": "failed"}')
    assert not completed(run, 12)
    run.summary.write_text('{"status": "completed"}')
    assert completed(run, 12)
    assert not completed(run, 13)
    write_manifest(run, dataclasses.replace(MANIFEST, checkpoint=None, progress=Progress()))
    assert completed(run, 12)  # it never made a checkpoint
    write_manifest(run, MANIFEST)
    run.model("final").rmdir()
    assert not completed(run, 12)


def test_progress_advances_as_a_copy() -> None:
    """An iteration that fails half-way leaves the progress it started from."""
    start = Progress(iteration=3, prompt_cursor=10)
    assert start.advanced(iteration=4) == Progress(iteration=4, prompt_cursor=10)
    assert start.iteration == 3


def test_a_run_without_a_manifest_or_of_another_format_is_refused(run: RunFolder) -> None:
    """A person reads this: what is wrong, and what to do about it."""
    with pytest.raises(UserError, match=r"no manifest\.json") as caught:
        read_manifest(run)
    assert "config.yaml" in caught.value.remedy
    write_manifest(run, MANIFEST)
    for found in ({"format": 1, "progress": {}}, {"format": 99, "more": []}):  # before there were digests, and after
        run.manifest.write_text(json.dumps(found))
        with pytest.raises(UserError, match=f"format {found['format']}, this version reads") as caught:
            read_manifest(run)
        assert not isinstance(caught.value, Damaged)
    write_sealed(run.manifest, {"format": 99})
    with pytest.raises(UserError, match="format 99"):
        read_manifest(run)


def test_a_crash_while_the_manifest_is_written_leaves_the_old_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old manifest with its old checkpoint is a run that can be resumed."""
    write_manifest(run, MANIFEST)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", crash)
        write_manifest(run, Manifest(progress=Progress(iteration=13), checkpoint="000013"))
    assert read_manifest(run) == MANIFEST


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_gets_its_name_only_when_it_is_hashed_and_complete(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at the last moment before the rename leaves no checkpoint of that name; afterwards every file counts."""
    aside, final = _write_aside(run), run.checkpoint(12)

    def crash(*_: object) -> None:
        hashed = set(json.loads((aside / "sha256.json").read_text()))
        assert hashed == {"state-main-0.safetensors", "state-main-1.safetensors", "manifest.json"}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", crash)
        seal_checkpoint(aside, final, run, MANIFEST)
    assert not final.exists()
    aside = empty_beside(final)
    seal_checkpoint(_fill(aside), final, run, MANIFEST)
    assert not aside.exists()
    verify_checkpoint(final)


def test_sealing_says_how_much_a_checkpoint_holds(run: RunFolder) -> None:
    """The bytes of the engines' files, in folders too, without what the run adds."""
    assert seal_checkpoint(_write_aside(run), run.checkpoint(12), run, MANIFEST) == 256 + 5


def test_sealing_takes_no_checkpoint_away(run: RunFolder) -> None:
    """One that is in the way was to be pruned first: between its end and the new name there would be none."""
    final = _sealed(run)
    with pytest.raises(OSError, match="not empty"):
        _sealed(run)
    verify_checkpoint(final)


@pytest.mark.parametrize("position", [0, 100, 255])
def test_a_flipped_byte_is_refused(position: int, run: RunFolder) -> None:
    """Any single byte of any file; the message names the file. Control: untouched it passes."""
    final = _sealed(run)
    verify_checkpoint(final)
    weights = final / "state-main-0.safetensors"
    content = bytearray(weights.read_bytes())
    content[position] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"state-main-0\.safetensors is damaged"):
        verify_checkpoint(final)


def test_a_missing_file_or_missing_hashes_are_refused(run: RunFolder) -> None:
    """Half a checkpoint is none."""
    final = _sealed(run)
    (final / "state-main-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"state-main-1\.safetensors is missing"):
        verify_checkpoint(final)
    (final / "sha256.json").unlink()
    with pytest.raises(UserError, match="incomplete"):
        verify_checkpoint(final)
    with pytest.raises(UserError, match="incomplete"):
        verify_checkpoint(run.checkpoint(99))


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_pruning_keeps_the_newest_and_removes_what_a_crash_left(keep: int, run: RunFolder) -> None:
    """By iteration, not by time of writing: 9 is older than 10."""
    for iteration in (10, 9, 11):
        _sealed(run, f"{iteration:06d}")
    _write_aside(run, "000012")
    prune_checkpoints(run, keep, "000011")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["000009", "000010", "000011"][-keep:]


@pytest.mark.parametrize(
    ("named", "left"), [("000150", ["000150"]), ("000200", ["000200"]), ("000100", ["000100"]), (None, [])]
)
def test_the_checkpoint_of_the_manifest_is_never_pruned(named: str | None, left: list[str], run: RunFolder) -> None:
    """One with a higher number was sealed by an attempt that was killed before the manifest moved: it goes.

    Without a folder there is nothing to do.
    """
    for name in ("000100", "000150", "000200"):
        _sealed(run, name)
    (run.checkpoints / "of a person").mkdir()
    prune_checkpoints(run, 1, named)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [*left, "of a person"]
    prune_checkpoints(run.finetuning, 1, named)


def test_a_run_that_is_opened_again_has_no_end_until_it_makes_one(run: RunFolder) -> None:
    """Neither its model nor its summary is left. Control: before, it had ended."""
    write_manifest(run, MANIFEST)
    run.model("final").mkdir(parents=True)
    (run.model("final") / "config.json").touch()
    run.summary.write_text('{"status": "completed"}')
    assert ended(run)
    reopen(run)
    assert not ended(run)
    assert not list(run.model("final").parent.iterdir())
    assert not run.summary.exists()
    reopen(run)


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ("heldout/accuracy", ["000003", "000005"]),
        ("highest heldout/accuracy", ["000003", "000005"]),
        ("lowest heldout/accuracy", ["000004", "000005"]),
        ("heldout/other", ["000005"]),
        (None, ["000005"]),
    ],
)
def test_the_best_checkpoint_is_kept_as_well(run: RunFolder, best: str | None, kept: list[str]) -> None:
    """By the figure of its iteration, the newest of equal ones; also when figures of others are missing.

    Control: without a name, and by a figure that there is not, the newest alone are kept.
    """
    for number, accuracy in ((1, 0.2), (2, 0.7), (3, 0.7), (4, 0.1), (5, None)):
        _sealed(run, f"{number:06d}")
        append_metrics(run, number, {} if accuracy is None else {"heldout/accuracy": accuracy})
    prune_checkpoints(run, 1, "000005", best=best)
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == kept
