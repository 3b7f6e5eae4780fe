"""Penstock: what is neither a flow, a task, an engine, a configuration nor mathematics, in rooms of its own.

`import penstock` also offers what a program needs to train (docs/python.md), each loaded when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api.run import Run as Run
    from penstock.api.training import train as train
    from penstock.base.errors import UserError as UserError
    from penstock.flows.parts.own_steps import Iteration as Iteration
    from penstock.session.logged import log as log

__version__ = "0.1.0"

OFFERED = {
    "Iteration": "penstock.flows.parts.own_steps",
    "Run": "penstock.api.run",
    "UserError": "penstock.base.errors",
    "log": "penstock.session.logged",
    "train": "penstock.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in OFFERED:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    return getattr(import_module(OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *OFFERED])
