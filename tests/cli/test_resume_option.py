"""`--resume` may stand without a path: the words behind it are then what they are without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.resume_option import with_mark


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("sums.yaml --resume", "sums.yaml --resume ?"),
        ("sums.yaml --resume --dry-run", "sums.yaml --resume ? --dry-run"),
        ("--resume sums.yaml", "--resume ? sums.yaml"),
        ("--resume iterations=9", "--resume ? iterations=9"),
        ("--resume run", "--resume run"),
        ("--resume gone iterations=9", "--resume gone iterations=9"),
        ("--resume a=b", "--resume a=b"),
        ("--resume=run sums.yaml", "--resume=run sums.yaml"),
        ("sums.yaml iterations=9", "sums.yaml iterations=9"),
    ],
)
def test_a_mark_stands_where_a_path_is_missing(
    given: str, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is a run, whatever it is called, and so is what is not there; a recipe or a change is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").touch()
    for name in ("run", "a=b"):
        (tmp_path / name).mkdir()
    assert with_mark(given.split()) == read.split()
