"""A user's own order of the steps of an iteration: found, and looked at before anything starts.

Left out: what it can do there (penstock/flows/parts/own_steps.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.usercode.given import given_or_imported

EXAMPLE = "my_dataflow:iteration"
SHAPE = "write it as in docs/python.md: def iteration(step)"


def load_dataflow(config: TrainConfig) -> Callable[[Any], object]:
    """Return the function that `dataflow` names.

    Raises:
        UserError: it cannot be found, or takes anything but the iteration.
    """
    spec = str(config.dataflow)
    function = given_or_imported("dataflow", spec, EXAMPLE)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"dataflow '{spec}' is asynchronous or a generator", SHAPE)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise UserError(f"dataflow '{spec}' is called with the iteration alone: {error}", SHAPE) from None
    return function
