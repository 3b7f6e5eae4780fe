"""A reader sees the old content or the new one, never a half of either."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from state.files import files_below, for_each_file, replacing, sha256, write_text


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
