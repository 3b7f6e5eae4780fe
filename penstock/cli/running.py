"""What surrounds the flow of a command that trains: its folder, Prefect's server, and how its end is told.

Left out: what is looked at before (penstock/cli/starting.py), and errors (penstock/session/flow_runs/failures.py).
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from penstock.base.interrupts import STOPPED
from penstock.cli.terminal import console, errors, short_path


def new_folder(config: Any, run: Path | None, suffix: str = "") -> Path:
    """Make the run folder and say where it is, so that an interrupted run can be found."""
    from penstock.state.run_folder import drop_if_empty, new_run_folder

    theirs = run is not None and run.exists()
    folder = new_run_folder(Path(config.folder), config.name + suffix, run).path
    console.print(f"run folder: {short_path(folder)}", highlight=False, soft_wrap=True)
    if not theirs:
        atexit.register(drop_if_empty, folder)  # stopped before the flow wrote to it: nobody could resume it
    return folder


@contextmanager
def ending_in_words(command: str, folder: Path, how_to: Callable[[str, Path], str] | None = None) -> Iterator[None]:
    """Start Prefect's server for a flow in the block; where the flow does not end well, say how to go on.

    Args:
        how_to: returns how, of a command and a folder; None: that of a run.
    """
    from penstock.cli.prefect.quiet import quiet_terminal
    from penstock.cli.prefect.server import Terminated, start_server
    from penstock.cli.starting import how_to_go_on

    start_server()
    tell = how_to or how_to_go_on
    try:
        with quiet_terminal():
            yield
    except (KeyboardInterrupt, Terminated) as end:
        how = tell(command, folder)
        errors.print(f"stopped, the engines are down. {how}", highlight=False, soft_wrap=True)
        raise SystemExit(STOPPED if isinstance(end, KeyboardInterrupt) else end.code) from None
    except Exception as error:
        error.add_note(tell(command, folder))
        raise


def print_summary(folder: Path) -> None:
    """Print what a run has come to, and where its report, model and pages are."""
    from penstock.cli.runs.pages import pages_of_run
    from penstock.reports import progress
    from penstock.state.manifest import read_kind
    from penstock.state.run_folder import RunFolder

    run, place = RunFolder(folder), quote(short_path(folder))
    model = next((path for path in map(run.model, ("final", "sft")) if path.exists()), run.model("final"))
    if not (folder / "summary.json").is_file():  # the flow has said what else is lacking, and why
        console.print(f"the model is {short_path(model)}", highlight=False, soft_wrap=True)
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    scores = read_kind(run) == "reward-model"
    scoring = {"Train with it": f"reward.model={short_path(model)}"} if scores else {}
    places = {
        "Run folder": str(folder),
        "Report": str(run.report),
        "Model": str(model),
        **scoring,
        "Serve it": f"penstock serve {place}",
        **pages_of_run(summary, f"penstock ui {quote(short_path(folder.parent))}"),
    }
    progress.print_summary(console, summary, places)
