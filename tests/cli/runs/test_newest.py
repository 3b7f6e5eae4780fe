"""`--resume` without a path goes on with the newest run of the recipe's name, if a person says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from penstock.base.errors import UserError
from penstock.cli.resume_option import NEWEST
from penstock.cli.runs.newest import newest_run, with_newest_run
from penstock.cli.starting import Asked
from penstock.session.opening import PREFERENCE, SFT, TRAIN
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and runs of it and of others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text("name: sums\nsft: {}\n", encoding="utf-8")
    (tmp_path / "pairs.yaml").write_text("data: {train: pairs.jsonl}\n", encoding="utf-8")
    for name, kind in (
        *(("sums-20260101-000000", "train"), ("sums-20260102-000000", "train"), ("sums-20260102-000000-2", "train")),
        *(("sums-20260102-000000-10", "train"), ("sums-20260109-000000", "preference"), ("sums-big", "train")),
        *(("sums-sft-20260103-000000", "sft"), ("sums-big-20260109-000000", "train"), ("other-20260104-000000", "sft")),
    ):
        run = RunFolder(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.config.touch()
        write_manifest(run, Manifest(Progress(iteration=3), kind=kind))
    began = RunFolder(tmp_path / "runs" / "sums-20260105-000000")  # and ended before it had a manifest
    began.path.mkdir()
    began.config.touch()
    return tmp_path


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[str]]:
    """Answer what is asked in a terminal; return the questions."""

    def answer(with_yes: bool) -> list[str]:
        asked: list[str] = []
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(typer, "confirm", lambda text, **_: asked.append(text) or with_yes)
        return asked

    return answer


@pytest.mark.parametrize(
    ("command", "name", "found"),
    [
        ("train", "sums", "sums-20260102-000000-10"),
        ("sft", "sums-sft", "sums-sft-20260103-000000"),
        ("sft", None, "other-20260104-000000"),
        ("preference", "sums", "sums-20260109-000000"),
        ("reward-model", None, None),
        ("train", "su", None),
    ],
)
def test_the_newest_of_a_command_and_a_name(here: Path, command: str, name: str | None, found: str | None) -> None:
    """By the time in its name, a counter behind it as a number. Control: names that only begin alike."""
    run = newest_run(here / "runs", command, name)
    assert (run and run.name) == found


def test_the_same_words_go_on_after_asking(here: Path, answered: Callable[[bool], list[str]]) -> None:
    """The recipe names the run, overrides are what may change. Controls: a path, which is taken; and no."""
    questions = answered(True)
    asked = with_newest_run(TRAIN, Asked(Path("sums.yaml"), ["iterations=9"], None, NEWEST))
    assert asked == Asked(None, ["iterations=9"], None, Path("runs/sums-20260102-000000-10"))
    assert asked.changes == ["iterations=9"]
    asked = with_newest_run(SFT, Asked(Path("sft.steps=9"), None, None, NEWEST))
    assert (asked.resume, asked.changes) == (Path("runs/other-20260104-000000"), ["sft.steps=9"])
    assert questions == [
        "continue runs/sums-20260102-000000-10 after iteration 3?", "continue runs/other-20260104-000000 after step 0?"
    ]  # fmt: skip
    given = Asked(None, None, None, Path("runs/sums-20260101-000000"))
    assert with_newest_run(TRAIN, given) is given
    answered(False)
    with pytest.raises(typer.Exit):
        with_newest_run(TRAIN, Asked(Path("sums.yaml"), None, None, NEWEST))


def test_without_a_terminal_the_run_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the path. Control: where there is no such run that is what is said."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="--resume runs/sums-20260102-000000-10"):
        with_newest_run(TRAIN, Asked(Path("sums.yaml"), None, None, NEWEST))
    with pytest.raises(UserError, match=r"holds no run of 'penstock train' of the name mine"):
        with_newest_run(TRAIN, Asked(Path("sums.yaml"), ["name=mine"], None, NEWEST))
    with pytest.raises(UserError, match="elsewhere holds no run"):
        with_newest_run(PREFERENCE, Asked(Path("pairs.yaml"), ["folder=elsewhere"], None, NEWEST))
