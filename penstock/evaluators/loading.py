"""From the names in `evaluate.evaluators` to evaluators: built-in ones by name, a user's class as `module:Class`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from penstock.base.errors import UserError
from penstock.evaluators.diversity import Diversity
from penstock.evaluators.heldout import Evaluator
from penstock.evaluators.kl import KL
from penstock.evaluators.length import Length
from penstock.evaluators.rewards import Rewards
from penstock.usercode.imports import import_named

BUILT_IN: dict[str, Callable[[], Evaluator]] = {"rewards": Rewards, "diversity": Diversity, "length": Length, "kl": KL}

_SETTING = "evaluate.evaluators:"
_EXAMPLE = "my_evaluators:Politeness"


def load_evaluators(specs: Sequence[str]) -> dict[str, Evaluator]:
    """Return an evaluator for each name, by that name.

    Raises:
        UserError: a class cannot be imported or made, is no evaluator, or two have the same name.
    """
    evaluators = {spec: load_evaluator(spec) for spec in specs}
    names = [evaluator.name for evaluator in evaluators.values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{_SETTING} two evaluators have the name '{twice[0]}'", "give each class a 'name' of its own")
    return evaluators


def load_evaluator(spec: str) -> Evaluator:
    """Return a built-in evaluator by its name, or an object of the class that `module:Class` names.

    Raises:
        UserError: see `load_evaluators`.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    make = import_named(_SETTING, spec, "class", _EXAMPLE)
    try:
        evaluator = make()
    except Exception as error:
        raise UserError(
            f"{_SETTING} '{spec}' cannot be made: {type(error).__name__}: {error}", "it is called without arguments"
        ) from error
    name = getattr(evaluator, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise UserError(
            f"{_SETTING} '{spec}' has no usable 'name' ({name!r})",
            "give the class an attribute 'name' of letters, digits and underscores; its figures are recorded under it",
        )
    if not callable(getattr(evaluator, "evaluate", None)):
        raise UserError(
            f"{_SETTING} '{spec}' has no method 'evaluate'",
            "add evaluate(self, heldout), which returns figures by name",
        )
    return evaluator
