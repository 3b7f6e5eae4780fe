"""Which groups of samples dynamic sampling takes: built-in filters and a user's own.

What a user's function gets, and what becomes of the groups: penstock/session/rollout/refused_groups.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.configs.sections.prompt_selection import DynamicSamplingConfig
from penstock.usercode.arguments import wanted
from penstock.usercode.imports import import_named

SETTING = "algorithm.dynamic_sampling.function"

ARGUMENTS = ("rewards", "parts", "responses", "prompt", "prompt_id", "row")


@dataclass(frozen=True)
class GroupFilter:
    """A user's function with its settings bound, and the arguments that it asks for."""

    spec: str
    callable: Callable[..., Any]
    wants: tuple[str, ...]

    def keeps(self, arguments: dict[str, Any]) -> bool:
        """Ask the function about one group.

        Raises:
            UserError: it raised, or returned neither true nor false.
        """
        try:
            answer = self.callable(**{name: arguments[name] for name in self.wants})
        except Exception as error:
            raise UserError(
                f"{SETTING} '{self.spec}' failed for prompt {arguments['prompt_id']}: {type(error).__name__}: {error}",
                "correct the function",
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise UserError(f"{SETTING} '{self.spec}' returned {answer!r}", "return true to keep the group, or false")
        return bool(answer)


def load_filter(config: DynamicSamplingConfig) -> GroupFilter | None:
    """Return the user's function, None without one.

    Raises:
        UserError: it cannot be imported, or asks for what is not there.
    """
    if config.function is None:
        return None
    function, settings = import_named(SETTING, config.function, "function", "my_filters:keep"), config.settings or {}
    parameters = inspect.signature(function).parameters
    wants = wanted(SETTING, config.function, parameters, settings, ARGUMENTS, "an argument of filters")
    return GroupFilter(config.function, functools.partial(function, **settings), wants)
