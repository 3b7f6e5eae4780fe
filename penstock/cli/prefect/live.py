"""Live overrides from the command line: values that a running training takes up with its next iteration.

They are a Prefect Variable of the run's folder (penstock/session/settings.py reads it). Left out: keys that cannot
change during a run; those are refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.variables import Variable

from penstock.base.errors import UserError
from penstock.cli.prefect.server import check_server, start_server
from penstock.configs.tree.recipes import parse
from penstock.session.session import read_config
from penstock.session.settings import apply_overrides, variable_to_set
from penstock.state.run_folder import open_run_folder


def set_overrides(folder: Path, pairs: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Lay `key=value` pairs over the live overrides of the run in `folder`; return the Variable and what it holds now.

    Raises:
        UserError: there is no such run, it is complete, a pair is malformed, a key cannot change, a value is not
            allowed, or the Prefect server does not answer.
    """
    run = open_run_folder(folder)
    name, config, given = variable_to_set(run), read_config(run), dict(_parse(pair) for pair in pairs)
    apply_overrides(config, dict.fromkeys(given))  # refuses a wrong key before a server is asked, or started
    check_server()
    start_server()
    there = Variable.get(name, default=None)
    overrides = (there if isinstance(there, dict) else {}) | given
    apply_overrides(config, overrides)
    Variable.set(name, overrides, overwrite=True)
    return name, overrides


def clear_overrides(folder: Path) -> str:
    """Take all live overrides back: the recipe's values and schedules are in force again. Return the Variable.

    An empty object, since a run without a variable keeps the overrides of its checkpoint.

    Raises:
        UserError: there is no such run, it is complete, or the Prefect server does not answer.
    """
    name = variable_to_set(open_run_folder(folder))
    check_server()
    start_server()
    Variable.set(name, {}, overwrite=True)
    return name


def _parse(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise UserError(f"'{pair}' is not key=value", "for example actor.optimizer.learning_rate=1e-6")
    return key.strip(), parse(value, f"'{pair}'")
