"""A reader sees the old content or the new one, never a half of either."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

import pytest

from penstock.base import files
from penstock.base.files import discard, files_below, filling, for_each_file, replacing, sha256, write_text


def test_an_exception_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    """Whatever was written aside until then disappears. Control: without the exception it arrives."""
    path = tmp_path / "manifest.json"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as aside:
        aside.write_text("half of the n")
        assert path.read_text() == "old"
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with replacing(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """A file that exists is complete; the folder it belongs in is made on the way."""
    path = tmp_path / "deep" / "er" / "file"
    with pytest.raises(ZeroDivisionError), replacing(path):
        raise ZeroDivisionError
    assert not path.exists()
    write_text(path, "\u00fc\n")
    assert path.read_bytes() == b"\xc3\xbc\n"


def test_a_block_that_writes_nothing_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """Renaming a file that was never written must not pass for success."""
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    """SHA-256 as anyone else computes it."""
    path = tmp_path / "file"
    path.write_bytes(b"weights" * 100_000)
    assert sha256(path) == hashlib.sha256(b"weights" * 100_000).hexdigest()


def test_every_file_below_a_folder_is_found_in_name_order(tmp_path: Path) -> None:
    """Folders are not files; hidden files are."""
    for name in ("b", "a/z", "a/.hidden"):
        write_text(tmp_path / name, "")
    (tmp_path / "empty").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in files_below(tmp_path)] == ["a/.hidden", "a/z", "b"]


def test_files_are_worked_on_side_by_side_and_answered_in_their_order() -> None:
    """Both calls wait for each other, which one after the other would never end; an error of one comes out."""
    both = threading.Barrier(2)

    def meet(path: Path) -> str:
        both.wait(timeout=10)
        return path.name

    assert for_each_file([Path("b"), Path("a")], meet) == ["b", "a"]
    with pytest.raises(ZeroDivisionError):
        for_each_file([Path("a"), Path("b")], lambda path: 1 / (path.name == "a"))


def test_a_folder_gets_its_name_when_all_below_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and every folder's entries before the rename, the entry of the new name after it."""
    steps: list[str] = []
    final, fsync, rename = tmp_path / "models" / "final", files.fsync, Path.rename

    def noted_fsync(path: Path) -> None:
        steps.append(str(path.relative_to(tmp_path)))
        fsync(path)

    def noted_rename(path: Path, target: Path) -> Path:
        steps.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(files, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    with filling(final) as aside:
        (aside / "adapter").mkdir()
        for name in ("config.json", "adapter/weights"):
            (aside / name).write_text("x")
        assert not final.exists()
    before, after = steps[: steps.index("renamed")], steps[steps.index("renamed") + 1 :]
    assert {path.replace(".final.partial", "final") for path in before} == {
        "models/final",
        "models/final/config.json",
        "models/final/adapter",
        "models/final/adapter/weights",
    }
    assert after == ["models"]
    assert [path.name for path in files_below(tmp_path)] == ["weights", "config.json"]


def test_a_folder_that_is_not_filled_to_the_end_is_not_there(tmp_path: Path) -> None:
    """Nor is anything beside it. Control: an empty folder is filled, and what a crash left is not in it."""
    final = tmp_path / "final"
    with pytest.raises(ZeroDivisionError), filling(final) as aside:
        (aside / "half").touch()
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    final.mkdir()
    (tmp_path / ".final.partial").mkdir()
    (tmp_path / ".final.partial" / "of an earlier attempt").touch()
    with filling(final) as aside:
        (aside / "whole").touch()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["final", "final/whole"]


def test_a_folder_is_discarded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the middle leaves nothing under its name; a folder that is not there is none to discard."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "weights").touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        remove, calls = shutil.rmtree, []

        def crash(path: Path, **options: bool) -> None:
            calls.append(path)
            if len(calls) == 2:  # the first makes room beside it
                raise KeyboardInterrupt
            remove(path, **options)

        patch.setattr(shutil, "rmtree", crash)
        discard(folder)
    assert not folder.exists()
    folder.mkdir()
    discard(folder)
    discard(folder)
    assert not list(tmp_path.iterdir())
