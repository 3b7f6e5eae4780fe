"""A benchmark of two trainings, one after the other, that may be cut off in the second: the first is not lost.

The half that has ended lies beside the result file, as a result of its own, until the other has ended, too. The same
command begun again goes on with the other, if all that decides the figures is as it was; nothing else may be combined.
Left out: what the files hold that a recipe names.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.machine import provenance
from penstock.benchmarks.reporting.result import BenchResult, new_result, read_result, write_result
from penstock.benchmarks.session import describe
from penstock.configs.schema import TrainConfig
from penstock.state.run_folder import RunFolder
from penstock.trackers.tracker import flatten

RECIPE = "recipe"  # setting of a half: its whole tree, of which results keep some sections


@dataclass(frozen=True)
class Half:
    """The training of a benchmark that comes first.

    Attributes:
        bench: name of the benchmark.
        mode: what its rows are called.
        config: its recipe, before the benchmark's prompts are written for it.
        command: the command line.
        out: result file of the whole benchmark; None: nothing is kept.
        more: settings besides the recipe that decide its figures.
    """

    bench: str
    mode: str
    config: TrainConfig
    command: str
    out: Path | None
    more: Mapping[str, Any]

    def ended(self) -> BenchResult | None:
        """Return what an earlier command has kept of it; None: nothing.

        Raises:
            UserError: that is of other settings, versions or machines.
        """
        if self.out is None or not (file := file_beside(self.out)).is_file():
            return None
        kept = read_result(file)
        asked = {"bench": self.bench, **provenance(self.command), "settings": self._settings()}
        if names := differing(_decisive(asked), _decisive(kept.model_dump(mode="json"))):
            problem = f"{file}, the half that has ended, differs in {', '.join(names)}"
            raise UserError(problem, "give another --out, or remove it to measure both halves")
        return kept

    def keep(self, figures: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> None:
        """Keep it, now that it has ended."""
        if self.out is not None:
            details = rows_of(self.mode, rows)
            kept = new_result(self.bench, self.command, figures, settings=self._settings(), details=details)
            write_result(file_beside(self.out), kept)

    def told(self, other: Path) -> str:
        """Return what is said once it has ended and the other, with run folder `other`, begins."""
        file = None if self.out is None else file_beside(self.out)
        kept = f", and is kept in {file}" if file is not None and file.is_file() else ""
        return f"the training '{self.mode}' has ended{kept}; the other's run folder is {other}"

    def _settings(self) -> dict[str, Any]:
        tree = self.config.model_dump(mode="json")
        return {"iterations": self.config.iterations, **self.more, **describe(self.config), RECIPE: tree}


def file_beside(out: Path) -> Path:
    """Return where the half is kept of which the whole will be in `out`.

    >>> file_beside(Path("results/waiting.json")).name
    'waiting.half.json'
    """
    return out.with_suffix(".half.json")


def forget_half(out: Path | None) -> None:
    """Remove what was kept of a half: the whole result is there."""
    if out is not None:
        file_beside(out).unlink(missing_ok=True)


def rows_of(mode: str, rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the figures of a training's iterations as details of a result."""
    return [{**row, "mode": mode, "iteration": number} for number, row in enumerate(rows, start=1)]


def differing(asked: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return the names of all that is not the same in both."""
    return sorted(name for name in asked.keys() | measured.keys() if asked.get(name) != measured.get(name))


def _decisive(result: Mapping[str, Any]) -> dict[str, str]:
    """Return by its name all of a result that decides its figures; of its recipe every key."""
    settings = dict(result["settings"])
    recipe = settings.pop(RECIPE, {})
    where = {name: result[name] for name in ("bench", "machine", "commit", "versions")}
    return flatten({**where, **settings, **recipe})


@contextmanager
def scratch_folder(say: Callable[[str], object]) -> Iterator[Path]:
    """A temporary folder for run folders; where a training is cut off those stay that have figures of iterations.

    Args:
        say: told which these are.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    with ExitStack() as cut_off:
        cut_off.callback(_leave, folder, say)
        yield folder
        cut_off.pop_all()
    shutil.rmtree(folder)


def _leave(folder: Path, say: Callable[[str], object]) -> None:
    runs = [path for path in sorted(folder.iterdir()) if path.is_dir() and RunFolder(path).metrics.is_file()]
    if not runs:
        shutil.rmtree(folder)
        return
    for run in runs:
        say(f"figures of the iterations that have ended: {RunFolder(run).metrics}")
