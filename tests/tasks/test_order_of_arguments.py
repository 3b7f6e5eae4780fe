"""Folders and files of tests may be named in any order: what a folder's conftest.py gives is there in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDING = "def test_it(shared: int) -> None:\n    assert shared\n"
SHARED = "import pytest\n\n@pytest.fixture\ndef shared() -> int:\n    return 1\n"
HOOK = "from tests.conftest import pytest_configure as pytest_configure\n"


@pytest.mark.parametrize(("conftest", "lost"), [(HOOK, 0), ("", 1)], ids=["ours", "control"])
def test_a_file_of_a_folder_above_between_two_folders_costs_no_fixtures(
    conftest: str, lost: int, tmp_path: Path
) -> None:
    """Where the control finds them as well, pytest does without `pytest_configure` of tests/conftest.py."""
    files = {
        "conftest.py": conftest,
        "test_above.py": "def test_it() -> None: ...\n",
        "room/conftest.py": SHARED,
        "room/one/test_one.py": NEEDING,
        "room/two/test_two.py": NEEDING,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n", encoding="utf-8")
    named = ["room/one", "test_above.py", "room/two/test_two.py::test_it"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--import-mode=importlib", *named]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ("fixture 'shared' not found" in ended.stdout, ended.returncode) == (bool(lost), lost), ended.stdout
