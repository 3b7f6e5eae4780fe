"""MLflow's server for its pages, without its advice on how other machines would reach it.

    python -m penstock.trackers.mlflow_server ui --port 5000

MLflow's command says at its start with which of its options it would listen for other machines. `penstock ui` has none
of them: its pages are for this machine alone, and whoever follows the advice finds no such option. MLflow prints it as
it prints warnings and errors, with no logger or setting of its own, so it alone is left out here.

Left out: everything else about the server, which is MLflow's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

ADVICE = "[MLflow] Security middleware enabled with default settings"


def without_advice(echo: Callable[..., None]) -> Callable[..., None]:
    """Return `click.echo` that prints all but how other machines would reach the server."""

    def told(message: Any = None, *arguments: Any, **named: Any) -> None:
        if not str(message).startswith(ADVICE):
            echo(message, *arguments, **named)

    return told


def serve() -> None:
    """Carry out the command line as `python -m mlflow` does, which ends this process."""
    from mlflow.cli import cli

    click.echo = without_advice(click.echo)
    cli()


if __name__ == "__main__":
    serve()
