"""A training as a call: `penstock.train`, with what the command `penstock train` looks at, starts and guards.

A program adds what a command cannot: functions of its own as callbacks, and as the dataflow of an iteration. Left out:
the trainings of the other commands; a program's functions in other processes, such as rewards, which are named as
`module:function` and imported there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.run import Run
from penstock.base.errors import UserError
from penstock.cli.libraries import quiet_libraries
from penstock.usercode.kept import is_being_spawned

if TYPE_CHECKING:
    from penstock.configs.schema import TrainConfig
    from penstock.session.callbacks import Callback


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *overrides: str,
    run_folder: str | Path | None = None,
    resume: str | Path | Run | None = None,
    dataflow: Callable[[Any], object] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a policy with reinforcement learning, to its end; return the run.

    Args:
        recipe: a YAML file, or what would be in one; None with `resume`.
        overrides: `section.key=value` in place of the recipe's; with `resume` what may change there.
        run_folder: of the new run; None: a folder that is made in the recipe's `folder`.
        resume: a run to go on with.
        dataflow: the steps of an iteration in an order of yours; gets a `penstock.Iteration`. It is the key `dataflow`.
        callbacks: each is called after every iteration with its number (0: the evaluation before) and its figures. What
            one raises ends the training, which can be resumed.

    Raises:
        UserError: something is wrong that only you can put right; what can be seen before is said before engines start.
        KeyboardInterrupt: Ctrl-C; the engines are down then, and the run can be resumed.
    """
    if is_being_spawned():
        said = "this script trains when it is imported, which the processes of its rewards do"
        raise UserError(said, "put what trains below: if __name__ == '__main__':")
    quiet_libraries()
    from penstock.usercode.given import given, name_of

    with ExitStack() as stack:
        changes = [*overrides]
        if dataflow is not None:
            stack.enter_context(given(dataflow))
            changes.append(f"dataflow={name_of(dataflow)}")
        if resume is None:
            return _begun(recipe, changes, run_folder, callbacks)
        if recipe is not None or run_folder is not None:
            raise UserError("a run goes on where it is, with its own configuration", "remove recipe and run_folder")
        return _gone_on(resume.folder if isinstance(resume, Run) else Path(resume), changes, callbacks)


def _begun(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    run_folder: str | Path | None,
    callbacks: Sequence[Callback],
) -> Run:
    from penstock.cli.starting import checked_config
    from penstock.data.source import reading_once
    from penstock.session.opening import TRAIN
    from penstock.state.run_folder import drop_if_empty, new_run_folder

    wanted = None if run_folder is None else Path(run_folder)
    with reading_once():
        config = checked_config(TRAIN, _config_of(recipe, overrides), wanted)
        _check_machine(config)
        folder = new_run_folder(Path(config.folder), config.name, wanted).path
        try:
            return _trained(config, folder, callbacks, run_folder=str(folder))
        finally:
            drop_if_empty(folder)


def _gone_on(folder: Path, changes: Sequence[str], callbacks: Sequence[Callback]) -> Run:
    from penstock.cli.starting import config_to_resume
    from penstock.data.source import reading_once
    from penstock.session.opening import TRAIN, Resume, is_complete

    going_on = Resume(folder, None, changes)
    if is_complete(TRAIN, going_on):
        return Run(folder)
    with reading_once():
        config = config_to_resume(TRAIN, going_on)
        if config is not None:
            _check_machine(config)
        return _trained(None, folder, callbacks, resume=str(folder), changes=list(changes))


def _config_of(recipe: str | Path | Mapping[str, Any] | None, overrides: Sequence[str]) -> TrainConfig:
    from penstock.configs.loading.load import load_config, parse_override, tree_of
    from penstock.configs.schema import TrainConfig

    if recipe is None:
        raise UserError("no recipe given", "name one: penstock.train('configs/quickstart.yaml')")
    if not isinstance(recipe, Mapping):
        return load_config(Path(recipe), overrides)
    return tree_of(recipe, [parse_override(override, TrainConfig) for override in overrides], "the recipe", TrainConfig)


def _check_machine(config: TrainConfig) -> None:
    from penstock.cli.prefect.server import check_server
    from penstock.session.opening import TRAIN, foreseen

    foreseen(TRAIN, config)
    check_server()


def _trained(config: TrainConfig | None, folder: Path, callbacks: Sequence[Callback], **told: Any) -> Run:
    from penstock.cli.prefect.quiet import quiet_terminal
    from penstock.cli.prefect.server import start_server
    from penstock.cli.starting import how_to_go_on
    from penstock.flows.train import train as train_flow
    from penstock.session.callbacks import called_back

    start_server()
    try:
        with quiet_terminal(), called_back(folder, callbacks):
            train_flow(config, **told)
    except Exception as error:
        error.add_note(how_to_go_on("train", folder))
        raise
    return Run(folder)
