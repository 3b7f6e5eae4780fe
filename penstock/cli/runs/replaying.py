"""`penstock replay`: tasks of an iteration again, and a table of what they gave against what was stored.

Left out: the replay itself (penstock/flows/replay.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.cli.terminal import console, short_path


def replayed(run: Path, iteration: int, tasks: list[str], tolerance: float, to: Path | None) -> bool:
    """Replay, show the table, and return whether all is equal.

    Raises:
        UserError: there is no such iteration or task, or what it needs is gone; said before a server starts.
    """
    from penstock.cli.prefect.quiet import quiet_terminal
    from penstock.cli.prefect.server import start_server
    from penstock.reports.progress import waiting
    from penstock.tasks.replay.differences import table_of
    from penstock.tasks.replay.inputs import planned

    plan = planned(run, iteration, tasks)
    if to is not None and to.exists() and any(to.iterdir()):
        raise UserError(f"{to} is not empty", "name another folder with --to")
    for line in (f"again: {', '.join(plan.tasks)}", plan.origin):
        if line:
            console.print(line, highlight=False, soft_wrap=True)
    start_server()
    from penstock.flows.replay import replay

    with quiet_terminal(), waiting(console, "replaying"):
        done = replay(str(run), iteration, tasks, tolerance, None if to is None else str(to))
    console.print(table_of(done.rows))
    different = len([row for row in done.rows if not row.equal])
    said = f"{different} of {len(done.rows)} are different" if different else f"all {len(done.rows)} are equal"
    where = f"; what was made again: {short_path(done.folder)}" if done.folder is not None else ""
    console.print(f"iteration {iteration}: {said}{where}", highlight=False, soft_wrap=True)
    return done.equal
