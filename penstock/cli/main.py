"""The command `penstock` as a process: Ctrl-C and errors end it with a sentence and an exit code.

A user's mistake ends with its message and exit code 2, without a traceback, before any engine starts. Ctrl-C is heeded
from the first import on, so all that takes its time to import is imported inside `main`.

Left out: which commands there are (app.py), and what is said of an error (penstock/session/flow_runs/failures.py).
"""

from __future__ import annotations

import sys
from typing import NoReturn

from penstock.base.interrupts import STOPPED, interrupts_end_at_once


def main() -> None:
    """Run the command line; the console script's entry point."""
    with interrupts_end_at_once():
        from pathlib import Path

        import typer

        from penstock.cli.app import app, meant_key
        from penstock.cli.libraries import quiet_libraries
        from penstock.cli.terminal import errors
        from penstock.session.flow_runs.failures import MISTAKE, told

        quiet_libraries()
    sys.path.append(str(Path.cwd()))  # reward functions are named from here; last: a user's tasks.py hides no room
    code = None
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):  # the first is what older Typers make of Ctrl-C; newer ones return 130
        code = STOPPED
    except Exception as error:
        if hasattr(error, "format_message"):
            # Click's own; empty where the help is the answer. Pydantic's word before ours says nothing.
            said = error.format_message().replace("Value error, ", "") + meant_key(error, sys.argv[1:])
            _fail(said, MISTAKE)
        if _is_interruption(error):
            code = STOPPED
        elif (failure := told(error, sys.argv[1:])) is None:
            raise
        else:
            _fail(*failure)
    if code:
        if code == STOPPED:
            errors.print("stopped")
        raise SystemExit(code)


def _is_interruption(error: Exception) -> bool:
    """Whether Ctrl-C came while pydantic wrote settings as text, which makes an error of its own of it."""
    from pydantic_core import PydanticSerializationError

    return isinstance(error, PydanticSerializationError) and KeyboardInterrupt.__name__ in str(error)


def _fail(message: str, code: int) -> NoReturn:
    from penstock.cli.terminal import errors, escaped

    if message:
        errors.print(f"[bold red]error:[/] {escaped(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
