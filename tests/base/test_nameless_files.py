"""Memory that lives in a file: it is written to the disk and read again, and leaves nothing in its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.base.nameless_files import file_system_of, map_nameless
from tests.base.mapped_files import drive_out, mapped_files

SIZE = 1 << 20
HOLDS_AND_DIES = """
import os, pathlib, signal, sys
from penstock.base.nameless_files import map_nameless
mapped = map_nameless(pathlib.Path(sys.argv[1]), 1 << 20)
mapped[:5] = b"state"
assert sys.argv[1] in pathlib.Path("/proc/self/maps").read_text()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_driven_out_to_the_disk_comes_back(tmp_path: Path) -> None:
    """Controls: it is zeros before, and in another file; without the memory there is no file."""
    one, other = (map_nameless(tmp_path, SIZE) for _ in range(2))
    assert one[:] == bytes(SIZE)
    one[5:9] = b"1234"
    assert len(mapped_files(str(tmp_path))) >= 1
    for place in mapped_files(str(tmp_path)):
        drive_out(*place)
    assert one[4:10] == b"\x001234\x00" and other[:] == bytes(SIZE)
    assert list(tmp_path.iterdir()) == []
    one.close()
    other.close()
    assert mapped_files(str(tmp_path)) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """Its file had no name to be found by; it did map one."""
    ended = subprocess.run([sys.executable, "-c", HOLDS_AND_DIES, str(tmp_path)], capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_folder_does_not_take_is_said_by_its_name(tmp_path: Path) -> None:
    """A folder that is absent, and more than a file can hold. Control: a file of this size."""
    map_nameless(tmp_path, SIZE).close()
    for folder, size in ((tmp_path / "absent", SIZE), (tmp_path, 1 << 62)):
        with pytest.raises(UserError, match=f"bytes of files cannot be kept in {folder}: "):
            map_nameless(folder, size)
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    """Controls: two mounts of a machine that differ, and none."""
    assert (file_system_of(Path("/proc/self")), file_system_of(Path("relative"))) == ("proc", "")
    assert file_system_of(Path("/")) not in ("proc", "")
