"""Every algorithm by name, collected from the files which declare one in ``ALGORITHMS``.

Importing this does not import torch, so the flow and the configs may. Settings are read off the functions'
signatures and hence cannot disagree with them.

A name with a colon, `module:function`, is a user's own. Its module says what it needs as a file of ours does: with
``NEEDS``, ``RATIO`` and, for a loss, a second function ``choose``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, get_args

from algorithms import advantages, policy_losses
from algorithms.advantages import ADVANTAGES, AdvantageEstimator
from algorithms.algorithm import Algorithm, Need
from algorithms.discovery import settings
from algorithms.policy_losses import CHOICES, POLICY_LOSSES, Choice, PolicyLoss
from penstock.base.errors import UserError
from penstock.usercode.imports import import_named, module_named

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "advantage_named",
    "choice_named",
    "collect",
    "has_ratio",
    "is_own",
    "needs",
    "own_settings_of",
    "policy_loss_named",
    "settings_of",
]

_ADVANTAGE, _POLICY_LOSS = "algorithm.advantage", "algorithm.policy_loss"


def collect(modules: Iterable[ModuleType]) -> dict[str, Algorithm]:
    """The algorithms that modules declare, by name.

    Raises:
        ValueError: one name is declared twice, or a default is none of the settings.
        KeyError: a declaration names an advantage or a policy loss that no file holds.
    """
    algorithms: dict[str, Algorithm] = {}
    for module in modules:
        for declared in getattr(module, "ALGORITHMS", ()):
            if declared.name in algorithms:
                raise ValueError(f"{module.__name__} declares algorithm {declared.name!r}, which is declared already")
            if unknown := set(declared.defaults) - set(settings_of(declared.advantage, declared.policy_loss)):
                raise ValueError(f"algorithm {declared.name!r} has no setting {', '.join(sorted(unknown))}")
            algorithms[declared.name] = declared
    return algorithms


def is_own(name: str) -> bool:
    """Whether a name is that of a user's function, `module:function`."""
    return ":" in name


def advantage_named(name: str) -> AdvantageEstimator:
    """The estimator of that name.

    Raises:
        UserError: a user's own cannot be imported, or cannot be called as an estimator is.
    """
    return _own(_ADVANTAGE, name) if is_own(name) else ADVANTAGES[name]


def policy_loss_named(name: str) -> PolicyLoss:
    """The policy loss of that name.

    Raises:
        UserError: a user's own cannot be imported, or cannot be called as a loss is.
    """
    return _own(_POLICY_LOSS, name) if is_own(name) else POLICY_LOSSES[name]


def choice_named(policy_loss: str) -> Choice | None:
    """What chooses tokens for a loss, or None for a loss without."""
    if is_own(policy_loss):
        return getattr(_loss_module(policy_loss), "choose", None)
    return CHOICES.get(policy_loss)


def settings_of(advantage: str, policy_loss: str) -> dict[str, Any]:
    """Settings of an estimator and a loss with their defaults; a name that both know is one setting of both.

    Those of a user's functions are not among them: see `own_settings_of`.
    """
    return _settings(advantage, policy_loss, own=False)


def own_settings_of(advantage: str, policy_loss: str) -> dict[str, Any]:
    """Settings of a user's estimator and loss with their defaults.

    The default is ``inspect.Parameter.empty`` where there is none, and where two functions have different ones: neither
    is to lose without a word.
    """
    return _settings(advantage, policy_loss, own=True)


def needs(advantage: str, policy_loss: str) -> frozenset[Need]:
    """What an estimator and a loss need beyond rewards and the current log-probs.

    Raises:
        UserError: a user's module needs what there is not.
    """
    modules = (_module(_ADVANTAGE, advantage, advantages.MODULES), _loss_module(policy_loss))
    found = frozenset(need for module in modules for need in getattr(module, "NEEDS", ()))
    if unknown := sorted(found - set(get_args(Need))):
        raise UserError(
            f"NEEDS of '{advantage}' or '{policy_loss}' has '{unknown[0]}', which there is not",
            f"it is a tuple of: {', '.join(get_args(Need))}",
        )
    return found


def has_ratio(policy_loss: str) -> bool:
    """Whether a loss compares the actor with the generating policy; a file that does not says ``RATIO = False``."""
    return bool(getattr(_loss_module(policy_loss), "RATIO", True))


def _settings(advantage: str, policy_loss: str, own: bool) -> dict[str, Any]:
    functions: list[Callable[..., Any]] = [advantage_named(advantage)] if is_own(advantage) == own else []
    if is_own(policy_loss) == own:
        choice = choice_named(policy_loss)
        functions += [policy_loss_named(policy_loss), *([] if choice is None else [choice])]
    found: dict[str, Any] = {}
    for function in functions:
        for name, default in settings(function).items():
            found[name] = default if found.get(name, default) == default else inspect.Parameter.empty
    return found


def _loss_module(name: str) -> ModuleType:
    return _module(_POLICY_LOSS, name, policy_losses.MODULES)


def _module(setting: str, name: str, ours: Mapping[str, ModuleType]) -> ModuleType:
    return module_named(setting, name, "function", _example(setting)) if is_own(name) else ours[name]


def _own(setting: str, spec: str) -> Callable[..., Any]:
    function = import_named(setting, spec, "function", _example(setting))
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not kinds or kinds[0] not in positional or set(kinds[1:]) - {inspect.Parameter.KEYWORD_ONLY}:
        raise UserError(
            f"{setting} '{spec}' must take its inputs as the one argument before a '*', and its settings behind it",
            f"for example: def {spec.partition(':')[2]}(inputs, *, margin=0.5)",
        )
    return function


def _example(setting: str) -> str:
    return f"my_algorithm:{setting.partition('.')[2]}"


ALGORITHMS: dict[str, Algorithm] = collect([*advantages.MODULES.values(), *policy_losses.MODULES.values()])
