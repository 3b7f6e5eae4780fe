"""Places that a command is to write to: an impossible one is refused before anything is measured for it."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import check_possible


def free_file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be."""
    if path is None:
        return None
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file")
    check_possible(path.parent, f"the file {path}", "name another one")
    return path


def free_folder(path: Path | None) -> Path | None:
    """Refuse a folder that cannot be."""
    if path is not None:
        check_possible(path, f"the folder {path}", "name another one")
    return path
