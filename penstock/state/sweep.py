"""The folder of a sweep: what was asked for, the trainings that it comes to, and a run folder for each of them.

    sweep.yaml     what was asked for, and the trainings by name     recipe.yaml    the recipe as it was then
    NAME/          a run folder of a training                        logs/          what each training printed
    report/        the comparison of them                        flow_run.txt   which flow run is at it

What is asked for is written once, before the first training begins, so a resume does what is left of the same. Whether
a training is done its own folder says. Left out: doing it (penstock/session/sweeps/).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.configs.tree.recipes import dump, read_mapping
from penstock.state.manifest import Tracked, ended
from penstock.state.run_folder import RunFolder


class Planned(BaseModel):
    """One training of a sweep: the name of its run folder, and what is laid over the recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    overrides: tuple[str, ...]


class Sweep(BaseModel):
    """What was asked for.

    Attributes:
        recipe: its name, for people.
        settings: as they were given.
        random: how many combinations chance has taken; None: all of them.
        draw_seed: of that chance.
        by: figure by which the best is told, with `lowest` before it where less is better.
        at_once: trainings at a time; None: as many as GPUs allow.
        trainings: all of them, in the order in which they begin.
        tracked: the tracker's run that those of the trainings are parts of; None: it has not begun.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    settings: tuple[str, ...]
    random: int | None
    draw_seed: int
    by: str
    at_once: int | None
    trainings: tuple[Planned, ...]
    tracked: Tracked | None = None

    def own(self, training: Planned) -> str:
        """Return what tells a training from the others, as overrides in one line."""
        every = [set(item.overrides) for item in self.trainings]
        return " ".join(text for text in training.overrides if not all(text in others for others in every))


@dataclass(frozen=True)
class SweepFolder:
    """Paths of a sweep. Creating the object touches nothing on disk."""

    path: Path

    @property
    def sweep(self) -> Path:
        """What was asked for."""
        return self.path / "sweep.yaml"

    @property
    def recipe(self) -> Path:
        """The recipe as it was when the sweep began."""
        return self.path / "recipe.yaml"

    @property
    def report(self) -> Path:
        """The folder of the report."""
        return self.path / "report"

    def run(self, training: Planned) -> RunFolder:
        """The run folder of a training."""
        return RunFolder(self.path / training.name)

    def log(self, training: Planned) -> Path:
        """What a training printed."""
        return self.path / "logs" / f"{training.name}.log"

    def left(self, sweep: Sweep) -> list[Planned]:
        """Return the trainings that have not come to their end."""
        return [training for training in sweep.trainings if not ended(self.run(training))]


def write_sweep(folder: SweepFolder, sweep: Sweep) -> None:
    """Write what was asked for, atomically."""
    write_text(folder.sweep, dump(sweep.model_dump(mode="json")))


def read_sweep(folder: SweepFolder) -> Sweep:
    """Return what was asked for.

    Raises:
        UserError: there is no sweep, or its file was changed.
    """
    if not folder.sweep.is_file():
        raise UserError(f"{folder.path} holds no sweep (no sweep.yaml in it)", "name the folder that a sweep printed")
    try:
        return Sweep.model_validate(read_mapping(folder.sweep))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder.sweep}: {where}: {first['msg']}", "bring it back as it was, or sweep anew") from None


def is_sweep(folder: Path) -> bool:
    """Whether a directory of run folders is that of a sweep."""
    return SweepFolder(folder).sweep.is_file()


def sweep_of(run: RunFolder) -> Sweep | None:
    """Return the sweep that a run is a training of; None: of none."""
    folder = SweepFolder(run.path.parent)
    return read_sweep(folder) if folder.sweep.is_file() else None
