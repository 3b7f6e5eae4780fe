"""How a command ends that failed: in a sentence where there is one to say, else with its traceback."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from penstock.base.errors import UserError
from penstock.cli import main as cli
from penstock.cli import running
from penstock.cli import terminal as cli_terminal
from penstock.cli.prefect import server
from penstock.cli.prefect.quiet import quiet_terminal
from penstock.cli.prefect.server import Terminated
from penstock.engines.groups.group import EngineError, HostLost, LostTooOften, OutOfMemory, RankLost
from penstock.engines.groups.hosts import HostFailed
from penstock.session.flow_runs.failures import FAILURE, LESS_MEMORY, LINES, MISTAKE, told

LOG = Path("runs/mine/logs/main-rank0.log")
ROUTINE = "2026-01-15 10:15:00,000 INFO __main__: update_actor (7/update_actor): 0.12 s\n"


def test_a_killed_rank_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who, why, where its log is and how to go on; not the end of the log, since a killed rank has no last word."""
    monkeypatch.setattr(server, "start_server", lambda: None)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RankLost) as caught, running.ending_in_words("train", tmp_path):
        raise RankLost("main", 0, "exited with signal 9 (SIGKILL)", LOG, ROUTINE * 50)
    message, code = told(caught.value, []) or ("", 0)
    assert message.splitlines() == [
        "group main, rank 0: exited with signal 9 (SIGKILL), out of memory?",
        f"  log: {LOG}",
        f"  Continue with: penstock train --resume {cli_terminal.short_path(tmp_path)}",
    ]
    assert code == FAILURE


def test_what_needs_less_memory_is_said_of_a_rank_that_has_none_left(tmp_path: Path) -> None:
    """Also where it was one time too many. Control: of another loss it is not."""
    lost = OutOfMemory("main", 0, "update_actor", tmp_path / "rank.log", "OutOfMemoryError: 2 GiB")
    message, code = told(lost, []) or ("", 0)
    assert message.splitlines()[:2] == [
        "group main, rank 0: no memory left on its GPU for 'update_actor'",
        "  OutOfMemoryError: 2 GiB",
    ]
    assert LESS_MEMORY in message and code == FAILURE
    too_often = LostTooOften("main", 0, "of 4 losses", tmp_path / "rank.log")
    assert LESS_MEMORY not in (told(too_often, []) or ("", 0))[0]
    too_often.__cause__ = lost
    assert LESS_MEMORY in (told(too_often, []) or ("", 0))[0]


def test_a_rank_that_ended_by_itself_is_quoted(tmp_path: Path) -> None:
    """The last lines that are no routine; all of them where the log is gone. Control: a rank that raised and lives."""
    log = tmp_path / "rank.log"
    log.write_text("all of it")
    cause = [f"line {number} of a long story" for number in range(30)]
    lost = RankLost("main", 1, "exited with code 1", log, ROUTINE * 50 + "\n".join(cause) + "\n" + ROUTINE)
    message, _ = told(lost, []) or ("", 0)
    assert message.splitlines()[1:-1] == [f"  {line}" for line in cause[-LINES:]]
    raised = EngineError(
        "main", 1, "update_actor", "Traceback\n" + "\n".join(cause) + "\nOutOfMemoryError: 2 GiB\n", log
    )
    message, code = told(raised, []) or ("", 0)
    assert message.startswith("group main, rank 1: 'update_actor' raised\n")
    assert "OutOfMemoryError: 2 GiB\n  log: " in message
    assert len(message.splitlines()) == LINES + 2
    assert code == FAILURE
    log.unlink()
    assert cause[0] in (told(lost, []) or ("", 0))[0]
    assert cause[0] in (told(raised, []) or ("", 0))[0]


@pytest.mark.parametrize(
    "error",
    [
        UserError("too many rewards failed", "start the server"),
        PermissionError(13, "Permission denied", "/runs/mine/metrics.jsonl"),
        RankLost("main", 0, "exited", LOG),
    ],
)
def test_a_failure_in_mid_run_says_how_to_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it was. Control: a mistake before there is a run has no such line."""
    monkeypatch.setattr(server, "start_server", lambda: None)
    monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["penstock"])
    (tmp_path / "manifest.json").write_text("{}")

    def in_a_flow(**_: object) -> None:
        with running.ending_in_words("train", tmp_path):
            raise error

    def before(**_: object) -> None:
        raise UserError("no recipe given", "name one")

    hint = f"\n  Continue with: penstock train --resume {cli_terminal.short_path(tmp_path)}\n"
    for command, told_how in ((in_a_flow, True), (before, False)):
        monkeypatch.setattr("penstock.cli.app.app", command)
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().err.endswith(hint) == told_how


def failing(path: Path) -> OSError:
    with pytest.raises(OSError, match=path.name) as caught:
        path.write_text("")
    return caught.value


@pytest.mark.parametrize("named", ["{}", "folder={}", "--out={}", "{}/below"])
def test_a_file_of_the_command_line_is_the_users(tmp_path: Path, named: str) -> None:
    """Missing, or of the wrong kind. Control: a file that the command line does not name."""
    path = tmp_path / "absent" / "file"
    message, code = told(failing(path), ["train", named.format(path)]) or ("", 0)
    assert message.startswith(f"{path}: No such file or directory\n")
    assert code == MISTAKE
    assert told(failing(path), ["train", named.format(tmp_path / "another")]) is None


def test_a_file_that_may_not_be_touched_is_the_users_wherever_it_is() -> None:
    """Controls: an error without a file, one that is of no file, and a defect."""
    message, code = told(PermissionError(13, "Permission denied", "/runs/of/another/.lock"), ["export", "run"]) or (
        "",
        0,
    )
    assert message.startswith("/runs/of/another/.lock: Permission denied\n")
    assert code == MISTAKE
    for defect in (PermissionError(1, "not yours"), ConnectionRefusedError(111, "refused"), ValueError("x")):
        assert told(defect, ["export", "run"]) is None


def test_the_terminal_is_spared_what_the_command_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else. Controls: a defect, another library's words, a warning in mid-run, and the same after."""
    root, logger = logging.getLogger(), logging.getLogger("prefect.flow_runs")
    terminal, everything = io.StringIO(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [PrefectConsoleHandler(terminal)])
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(everything)])

    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:
            logger.exception("Encountered exception during execution: %r", error)  # prefect/flow_engine.py

    with quiet_terminal():
        fail(UserError("a mistake"))
        fail(RankLost("main", 0, "exited", LOG))
        fail(HostLost("main", 0, "its host is lost", LOG))
        fail(HostFailed("pool/0", "OSError: no space"))
        logger.error("Finished in state Failed(\"EngineError('main')\")")
        logger.error("Crash detected! Execution was aborted by an interrupt signal.")
        logger.error("Crash detected! Execution was aborted by a termination signal.")
        for end in (Terminated(143), SystemExit(1)):
            assert terminal.getvalue() == ""
            try:
                raise end
            except SystemExit:
                logger.error("Crash detected! Execution was aborted by Python system exit call.")
        assert "system exit" in terminal.getvalue(), "a user's own"
        fail(ValueError("a defect"))
        logging.getLogger("other").error("UserError")
        logger.warning("evaluator mine failed: PermissionError: /data/answers.txt")
    assert "a defect" in terminal.getvalue()
    assert "answers.txt" in terminal.getvalue()
    assert "UserError" in terminal.getvalue()
    fail(UserError("afterwards"))
    assert "afterwards" in terminal.getvalue()
    for words in ("a mistake", "RankLost", "EngineError", "Crash detected"):
        assert words in everything.getvalue()


def test_help_in_place_of_a_command_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments; and the version is printed. Control: a command that is not there."""
    monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for arguments in ([], ["bench"], ["no-command"]):
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == MISTAKE
        assert ("error" in capsys.readouterr().err) == (arguments == ["no-command"])
    monkeypatch.setattr(sys, "argv", ["penstock", "--version"])
    cli.main()
    assert capsys.readouterr().out.startswith("penstock ")


def test_what_a_host_could_not_do_is_told_with_its_end() -> None:
    """Which host, and what it said last. Control: of a host that is lost there is one line."""
    said = told(HostFailed("h200/1", "Traceback\n  line\nOSError: [Errno 28] No space left on device: 'logs'"), [])
    assert said is not None
    assert said[1] == 1
    assert said[0].startswith("host h200/1:") and said[0].endswith("No space left on device: 'logs'")
    lost = told(HostLost("main", 2, "its host h200/1 is lost: node-7 is silent for 30 s", LOG), [])
    assert lost is not None
    assert lost[0].splitlines()[0] == "group main, rank 2: its host h200/1 is lost: node-7 is silent for 30 s"
