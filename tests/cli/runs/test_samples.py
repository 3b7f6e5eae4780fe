"""`penstock samples`: the commands of docs/samples.md work as they stand there; a mistake is a message, exit code 2."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.reports.samples.reading import samples_of
from penstock.reports.samples.terminal import shown
from tests.reports.samples.played import EVIL, play_episodes, played_run
from tests.reports.samples.test_reading import keep_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "samples.md"
EPISODES = re.findall(r"^penstock (episodes [^#\n]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
COMMANDS = re.findall(r"^penstock (samples [^#\n]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command where runs/sums is a run; return what it printed."""
    played_run(tmp_path / "runs" / "sums")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)

    def run(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *shlex.split(command)])
        cli.main()
        return capsys.readouterr().out

    return run


def test_the_page_has_commands() -> None:
    """The control of the next test."""
    assert len(COMMANDS) >= 8 and len(EPISODES) >= 5


@pytest.mark.parametrize("command", EPISODES)
def test_commands_about_episodes_work(command: str, penstock: Callable[..., str], tmp_path: Path) -> None:
    """On a run with an environment."""
    play_episodes(tmp_path / "runs" / "played")
    assert "turn 1" in penstock(command.replace("runs/sums", "runs/played"))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_work(command: str, penstock: Callable[..., str]) -> None:
    """Whatever they show, they end well and show rewards."""
    played = command.replace("--iteration 7", "--iteration 12")
    assert "reward" in penstock(played)


def test_the_lowest_reward_comes_first_where_the_highest_does_not(penstock: Callable[..., str]) -> None:
    """The option --reverse turns the order round."""
    highest, lowest = (penstock(f"samples runs/sums --sort reward --limit 1{more}") for more in ("", " --reverse"))
    assert "train-000018/0  reward 1.000 (format 1.000)" in highest
    assert "train-000017/0  reward 0.000 (format 0.000)" in lowest
    assert "cut" in lowest


def test_a_prompt_is_shown_token_by_token(penstock: Callable[..., str]) -> None:
    """In a pipe with the advantages as numbers; masked tokens in braces."""
    text = penstock("samples runs/sums --prompt 18")
    assert "{8} [.]+0.38 [<eos>]+0.50" in text
    assert "[8]+0.25 [.]+0.38 [<eos>]+0.50" in text
    assert "train-000017" not in text


def test_what_a_model_wrote_does_nothing_to_the_terminal(penstock: Callable[..., str]) -> None:
    """Neither in the list nor token by token: no escape sequence comes through, and the text can still be read."""
    assert "\x1b]0;" in EVIL
    for command in ("samples runs/sums", "samples runs/sums --prompt 17", "samples runs/sums --against 10"):
        text = penstock(command)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "␛]0;owned␇" in penstock("samples runs/sums")
    assert shown("a\tb\nc\x7f\x9b") == "a\tb\nc␡\N{REPLACEMENT CHARACTER}"


def test_an_experience_that_is_gone_is_said(penstock: Callable[..., str], tmp_path: Path) -> None:
    """Its table is shown instead. Control: nothing of the kind where it is there."""
    assert "not in the run folder" not in penstock("samples runs/sums --iteration 10")
    keep_table(samples_run := played_run(tmp_path / "runs" / "kept"), 10)
    text = penstock("samples runs/kept --iteration 10")
    assert "the experience of iteration 10 is not in the run folder: there are 1 rows that samples/000010.json" in text
    assert samples_of(samples_run, 10).is_table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--iteration 7", "there is the experience of iterations 10, 12"),
        ("--evaluation --iteration 7", "there are evaluations after iterations 0, 12"),
        ("--sort format", "one of: reward, truncated, policy_version, length, advantage, reward/format"),
        ("--evaluation --sort advantage", "one of: reward, truncated, length, reward/format"),
        ("--prompt 4", "there are 3 prompts: 17, 18, 19"),
        ("--against 12", "names the iteration itself"),
        ("--against 7", "no responses of iteration 7"),
        ("--reverse", "--reverse has no effect without --sort"),
        ("--against 10 --sort reward", "--sort and --prompt have no effect"),
        ("--limit 0", "--limit"),
    ],
)
def test_mistakes_name_what_there_is(
    options: str, said: str, penstock: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One message, exit code 2, no traceback. Control: the commands above."""
    with pytest.raises(SystemExit) as ended:
        penstock(f"samples runs/sums {options}")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert "Traceback" not in told.err


def test_a_folder_without_a_run_is_refused(penstock: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """With what to name instead."""
    with pytest.raises(SystemExit) as ended:
        penstock("samples runs")
    assert ended.value.code == 2
    assert "holds no run" in capsys.readouterr().err


def test_episodes_are_shown_turn_by_turn(penstock: Callable[..., str], tmp_path: Path) -> None:
    """With what was said between the turns, and why one failed. Control: responses without an environment are none."""
    with pytest.raises(SystemExit):
        penstock("episodes runs/sums")
    play_episodes(tmp_path / "runs" / "played")
    text = penstock("episodes runs/played --sort turns")
    assert re.findall(r"(turn \d+|told) +(\d+)  (\S+)", text) == [
        *[("turn 1", "5", "[4+4]"), ("told", "3", "=8"), ("turn 2", "3", "8.<eos>")],
        *[("told", "2", "9"), ("turn 1", "3", "9.<eos>"), ("turn 1", "3", "1.<eos>")],
    ]
    assert "no reward: environment: timed out" in text
    failed = penstock("episodes runs/played --failed")
    assert "train-000017/1" in failed and "train-000017/0" not in failed
    assert "none of these" in penstock("episodes runs/played --failed --prompt 18")
