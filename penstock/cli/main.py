"""The command `penstock`: its commands, and errors as sentences.

A user's mistake ends with its message and exit code 2, without a traceback, before any engine starts. Left out: the
commands themselves (penstock/cli/commands), and what is said of an error (penstock/session/flow_runs/failures.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic_core import PydanticSerializationError

from penstock import __version__
from penstock.cli.commands import bench, chains, machine, models, runs, sweeps, training
from penstock.cli.libraries import quiet_libraries
from penstock.cli.resume_option import ResumesNewest
from penstock.cli.terminal import console, errors, escaped
from penstock.configs.loading.keys import exists
from penstock.configs.schema import TrainConfig
from penstock.session.flow_runs.failures import MISTAKE, told

ABOUT = "Post-train language models with reinforcement learning, as a Prefect workflow."

FIRST = "A first run: penstock train configs/quickstart.yaml. What a recipe may say: penstock keys."

TRAIN = "Train"

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    TRAIN: {
        "train": training.train,
        "sweep": sweeps.sweep,
        "chain": chains.chain,
        "sft": training.sft,
        "preference": training.preference,
        "reward-model": training.reward_model,
        "keys": training.keys,
    },
    "Prepare the machine": {
        "doctor": machine.doctor,
        "server": machine.server,
        "deploy": machine.deploy,
        "host": machine.host,
        "chaos": machine.chaos,
    },
    "Follow and compare runs": {
        "samples": runs.samples,
        "episodes": runs.episodes,
        "compare": runs.compare,
        "select": runs.select,
        "replay": runs.replay,
        "sync": runs.sync,
        "set": runs.set_live,
        "ui": runs.ui,
    },
    "Use a trained model": {
        "evaluate": models.evaluate,
        "export": models.export,
        "promote": models.promote,
        "serve": models.serve,
        "loadtest": models.loadtest,
    },
}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT, epilog=FIRST)

for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, cls=ResumesNewest if panel == TRAIN else None, rich_help_panel=panel)(command)

app.add_typer(bench.app, name="bench", rich_help_panel="Prepare the machine")


def main() -> None:
    """Run the command line; the console script's entry point."""
    sys.path.append(str(Path.cwd()))  # reward functions are named from here; last: a user's tasks.py hides no room
    quiet_libraries()
    code = None
    try:
        code = app(standalone_mode=False)
    except typer.Abort:  # what older Typers make of Ctrl-C in a command; newer ones return 130
        code = 130
    except Exception as error:
        if hasattr(error, "format_message"):
            # Click's own; empty where the help is the answer. Pydantic's word before ours says nothing.
            _fail(error.format_message().replace("Value error, ", "") + _meant_key(error))
        if _is_interruption(error):
            code = 130
        elif (failure := told(error, sys.argv[1:])) is None:
            raise
        else:
            _fail(*failure)
    if code:
        if code == 130:
            errors.print("stopped")
        raise SystemExit(code)


def _meant_key(error: Exception) -> str:
    """Return what to write instead of an option that is a key of recipes, empty for any other error."""
    key = str(getattr(error, "option_name", "")).removeprefix("--")
    known = sys.argv[1:2] and sys.argv[1] in COMMANDS[TRAIN] and exists(key.split("."), TrainConfig)
    return f"\n  a key of a recipe is given without dashes: {key}=VALUE" if known else ""


def _is_interruption(error: Exception) -> bool:
    """Whether Ctrl-C came while pydantic wrote settings as text, which makes an error of its own of it."""
    return isinstance(error, PydanticSerializationError) and KeyboardInterrupt.__name__ in str(error)


def _fail(message: str, code: int = MISTAKE) -> NoReturn:
    if message:
        errors.print(f"[bold red]error:[/] {escaped(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"penstock {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - the callback has done all
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None: ...


if __name__ == "__main__":
    main()
