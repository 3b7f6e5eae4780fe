"""What a command that trains looks at before a server starts: what it was given, and the run that this means.

It only reads: a mistake is said at once, and leaves nothing behind. The flow looks again when the run becomes its own
(penstock/session/opening.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from penstock.base.errors import UserError
from penstock.checks.found_models import with_models_found
from penstock.cli.terminal import console, short_path
from penstock.configs.loading.load import load_tree
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.reports.progress import waiting
from penstock.session.opening import Kind, Resume, Tree, looked_at
from penstock.state.run_folder import RunFolder, check_free, check_place


@dataclass(frozen=True)
class Asked:
    """What a command that trains was given: a recipe with overrides and perhaps a folder, or a run to go on with."""

    recipe: Path | None
    overrides: list[str] | None
    run: Path | None
    resume: Path | None

    @property
    def changes(self) -> list[str]:
        """What a resume is to change. It takes no recipe, so the argument in a recipe's place is the first `key=value`.

        Raises:
            UserError: a recipe stands there, or a folder for a new run is named.
        """
        first = [] if self.recipe is None else [str(self.recipe)]
        if self.run is not None or any("=" not in given for given in first):
            what = "remove the recipe and --run; --resume without a path takes the newest run of a recipe's name"
            raise UserError("--resume continues a run with its own configuration", what)
        return [*first, *(self.overrides or ())]


def new_config(kind: Kind[Tree], asked: Asked, example: str) -> Tree:
    """Return the checked configuration of a new run, whose folder is not made yet.

    Args:
        example: where there is a recipe, for those who named none.

    Raises:
        UserError: there is no recipe, it cannot work, or the folder is taken.
    """
    if asked.recipe is None:
        raise UserError("no recipe given", example)
    return checked_config(kind, load_tree(asked.recipe, asked.overrides or (), kind.tree), asked.run)


def checked_config(kind: Kind[Tree], config: Tree, run: Path | None) -> Tree:
    """Return the configuration of a new run once it is seen to work; its models are folders then.

    Args:
        run: the folder that is named for it.

    Raises:
        UserError: it cannot work, or the folder is taken.
    """
    _check_folder(config, run)
    config = with_models_found(config)  # a download shows how far it is
    with waiting(console, "checking the recipe"):
        kind.check(config)
    return config


def config_to_resume(kind: Kind[Tree], going_on: Resume) -> Tree | None:
    """Return the checked configuration with which a run goes on; None: it is damaged, and the flow makes it whole.

    Raises:
        UserError: it cannot go on so.
    """
    return looked_at(kind, going_on, how_to_go_on(kind.name, going_on.run.path))


def _check_folder(config: TrainConfig | PairConfig, run: Path | None) -> None:
    if run is not None:
        check_free(run)
    check_place(run or Path(config.folder))


def how_to_go_on(command: str, folder: Path) -> str:
    """Return how a run continues; a run that was stopped before its engines were up has nothing to resume."""
    place = quote(short_path(folder))
    if RunFolder(folder).manifest.is_file():
        return f"Continue with: penstock {command} --resume {place}"
    if not RunFolder(folder).config.is_file():
        return "Nothing was trained, and nothing is left of it: give the same command again."
    return f"Nothing was trained; start anew with: penstock {command} {place}/config.yaml --run ANOTHER_FOLDER"
