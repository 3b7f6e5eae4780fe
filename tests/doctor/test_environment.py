"""The proof of the installation tells a working import from a broken one, and says why in one line."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.doctor import environment
from penstock.doctor.environment import Finding, Probe, broken, examine, reason, report


def test_a_working_statement_yields_its_version_and_no_failure() -> None:
    found = examine(Probe("python", "import platform; print('noise'); print(platform.python_version())", "none"))
    assert found.version == ".".join(map(str, sys.version_info[:3]))
    assert found.failure == ""


def test_a_failing_statement_yields_one_line_with_the_cause() -> None:
    found = examine(Probe("absent", "import no_such_library", "install it"))
    assert found.version == ""
    assert found.failure == "ModuleNotFoundError: No module named 'no_such_library'"
    assert report([found]) == f"absent does not work: {found.failure} -> install it"


def test_a_killed_interpreter_is_a_failure_and_not_a_crash_of_the_proof() -> None:
    found = examine(Probe("fatal", f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})", "buy another"))
    assert found.failure == "the interpreter was killed by SIGILL"


def test_the_last_exception_of_a_chain_is_kept_with_all_its_lines() -> None:
    chain = (
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in <module>\n'
        "KeyError: 'first'\n"
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 2, in <module>\n'
        "RuntimeError: Failed to import (look up to see its traceback):\n"
        "operator torchvision::nms does not exist\n"
    )
    expected = "RuntimeError: Failed to import (look up to see its traceback): operator torchvision::nms does not exist"
    assert reason(chain, 1) == expected


def test_a_silent_failure_still_has_a_reason() -> None:
    assert reason("", 3) == "exit code 3 without a message"


def test_one_failure_replaces_the_line_of_versions() -> None:
    good = Finding(Probe("good", "", ""), "1.2", "")
    unversioned = Finding(Probe("system", "", ""), "", "")
    bad = Finding(Probe("bad", "", "mend it"), "", "ImportError: torn")
    assert report([good, unversioned]) == "good 1.2"
    assert report([good, bad]) == "bad does not work: ImportError: torn -> mend it"


def test_only_installed_libraries_that_fail_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole_wheel.py").write_text("")
    (tmp_path / "torn_wheel.py").write_text("raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    modules = ["whole_wheel", "torn_wheel", "absent_wheel"]
    assert broken(modules, needs="json") == ["torn_wheel"]
    assert broken(modules, needs="absent_wheel") == [], "with the base library missing, the optional ones prove nothing"


@pytest.mark.parametrize(("statement", "code"), [("print('1.0')", 0), ("raise SystemExit('torn')", 1)])
def test_the_exit_code_follows_the_findings(
    statement: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "PROBES", (Probe("thing", statement, "mend it"),))
    assert environment.main([]) == code
    assert capsys.readouterr().out == ("thing 1.0\n" if code == 0 else "thing does not work: torn -> mend it\n")
