"""A tracker as a user adds one: this file, which a recipe names. It appends to a file of lines per run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.trackers.tracker import ITERATION, Artifact, Figures, Model, NewRun, Status, Table


class Lines:
    """Runs in a folder beside the run folders."""

    label = "Lines"
    page = ""

    def __init__(self, folder: Path) -> None:
        self._folder, self.run = folder / "lines", ""
        self.address = str(self._folder)

    def open(self, new: NewRun) -> str:
        self._folder.mkdir(exist_ok=True)
        self.run = f"{new.experiment}-{len(list(self._folder.iterdir()))}"
        self._append({"begun": new.name, "tags": dict(new.tags)})
        return self.run

    def find(self, run: str) -> bool:
        self.run = run
        return self._file.is_file()

    def resume(self) -> None:
        self._append({"status": None})

    def configure(self, settings: Mapping[str, str]) -> bool:
        if dict(settings) in self._of("settings"):
            return False
        self._append({"settings": dict(settings)})
        return True

    def log(self, figures: Sequence[Figures]) -> None:
        for item in figures:
            self._append({"step": item.step, "figures": dict(item.values)})

    def logged(self, figure: str) -> set[int]:
        return {line["step"] for line in self._lines() if figure in line.get("figures", ())}

    def logged_through(self) -> int:
        return max(self.logged(ITERATION), default=-1)

    def table(self, table: Table) -> None:
        self._append({"table": table.name, "rows": table.rows(), "bytes": table.path.stat().st_size})

    def artifact(self, artifact: Artifact) -> None:
        text = artifact.content if isinstance(artifact.content, str) else ""
        self._append({"artifact": artifact.name, "bytes": len(text.encode())})

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        held = {line.get("table") or line.get("artifact"): line["bytes"] for line in self._lines() if "bytes" in line}
        return {name for name, path in files.items() if held.get(name) != path.stat().st_size}

    def model(self, model: Model) -> str | None:
        return None

    def status(self) -> Status | None:
        status: Status | None = self._of("status")[-1] if self._of("status") else None
        return status

    def close(self, status: Status, at_s: float) -> None:
        self._append({"status": status, "at": at_s})

    @property
    def _file(self) -> Path:
        return self._folder / f"{self.run}.jsonl"

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]

    def _of(self, key: str) -> list[Any]:
        return [line[key] for line in self._lines() if key in line]


class Forgetful(Lines):
    """Control: one that does not say what it holds."""

    def logged_through(self) -> int:
        return -1


class Away(Lines):
    """One whose server is away while a file says so."""

    def log(self, figures: Sequence[Figures]) -> None:
        if (self._folder / "away").exists():
            raise ConnectionError("the server is away")
        super().log(figures)
