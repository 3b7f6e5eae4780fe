"""The commands of `penstock`, in the order in which its help shows them, and what they have in common.

Left out: the commands themselves (penstock/cli/commands), and how one ends (penstock/cli/main.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.commands import bench, chains, machine, models, runs, sweeps, training
from penstock.cli.resume_option import ResumesNewest
from penstock.cli.terminal import console
from penstock.configs.loading.keys import exists

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


def meant_key(error: Exception, arguments: Sequence[str]) -> str:
    """Return what to write instead of an option that is a key of recipes, empty for any other error.

    Args:
        arguments: of the command line.
    """
    from penstock.cli.prefect.form import TREES

    key = str(getattr(error, "option_name", "")).removeprefix("--")
    command = arguments[0] if arguments else ""
    tree = TREES.get("train" if command == "sweep" else command)  # of no chain, whose keys begin with a stage
    is_key = tree is not None and exists(key.split("."), tree)
    return f"\n  a key of a recipe is given without dashes: {key}=VALUE" if is_key else ""


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
