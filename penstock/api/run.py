"""A run folder as a program looks at it: its figures, its summary, its model. Nothing is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.state.experience import column_names, read_columns
from penstock.state.run_folder import RunFolder, read_metrics


@dataclass(frozen=True)
class Run:
    """A run of `penstock.train`, also one that has ended long ago or is under way.

    Attributes:
        folder: the run folder.
    """

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """The figures, a row for each iteration that is recorded; 0 is the evaluation before training."""
        rows = {record["iteration"]: record["metrics"] for record in read_metrics(RunFolder(self.folder))}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("iteration")

    @property
    def summary(self) -> dict[str, Any]:
        """What the run has come to, as `summary.json` has it.

        Raises:
            UserError: it has not ended.
        """
        path = RunFolder(self.folder).summary
        if not path.is_file():
            raise UserError(f"{self.folder} has no summary yet", "it is written when the run ends")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return summary

    @property
    def model(self) -> Path:
        """The folder of the trained model, in the format of Transformers; there once the run is complete."""
        return RunFolder(self.folder).model("final")

    def experience(self, iteration: int) -> pd.DataFrame:
        """Return the samples of an iteration, a row each, from prompt to advantage.

        Raises:
            UserError: the run has none of that iteration.
        """
        path = RunFolder(self.folder).experience(iteration)
        if not path.is_file():
            raise UserError(f"{self.folder} has no experience of iteration {iteration}", f"see {path.parent}")
        columns = read_columns(path, column_names(path))
        ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
        lists = {name: [column.row(row) for row in range(len(column))] for name, column in ragged.items()}
        return pd.DataFrame(columns | lists)
