"""Every algorithm by name, collected from the files which declare one in ``ALGORITHMS``.

Importing this does not import torch, so the flow and the configs may. Settings are read off the functions'
signatures and hence cannot disagree with them.

A name with a colon, `module:function`, is a user's own. Its module says what it needs as a file of ours does: with
``NEEDS``, ``SEPARABLE``, ``RATIO`` and, for a policy loss, a second function ``choose``; for a preference loss with
``LABELLED`` and ``REFERENCE``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

from penstock.algorithms import advantages, policy_losses, preference
from penstock.algorithms.advantages import ADVANTAGES, AdvantageEstimator
from penstock.algorithms.declarations.algorithm import Algorithm, Need
from penstock.algorithms.declarations.settings import REQUIRED, Setting, settings
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES, Choice, PolicyLoss
from penstock.algorithms.preference import PREFERENCE_LOSSES, PreferenceLoss
from penstock.base.errors import UserError
from penstock.usercode.imports import import_named, module_named

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "advantage_named",
    "choice_named",
    "collect",
    "every_preference_setting",
    "every_setting",
    "functions_of",
    "has_ratio",
    "is_labelled",
    "is_own",
    "is_separable",
    "needs",
    "needs_reference",
    "policy_loss_named",
    "preference_loss_named",
    "settings_of",
    "shared_settings",
]

_ADVANTAGE, _POLICY_LOSS, _PREFERENCE_LOSS = "algorithm.advantage", "algorithm.policy_loss", "loss.name"
_EXAMPLES = {
    _ADVANTAGE: "my_algorithm:advantage",
    _POLICY_LOSS: "my_algorithm:policy_loss",
    _PREFERENCE_LOSS: "my_algorithm:preference_loss",
}


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


def preference_loss_named(name: str) -> PreferenceLoss:
    """The preference loss of that name.

    Raises:
        UserError: a user's own cannot be imported, or cannot be called as a loss is.
    """
    return _own(_PREFERENCE_LOSS, name) if is_own(name) else PREFERENCE_LOSSES[name]


def choice_named(policy_loss: str) -> Choice | None:
    """What chooses tokens for a loss, or None for a loss without."""
    if is_own(policy_loss):
        return getattr(_loss_module(policy_loss), "choose", None)
    return CHOICES.get(policy_loss)


def functions_of(advantage: str, policy_loss: str) -> dict[str, Callable[..., Any]]:
    """The functions that work together: an estimator, a loss and its choice if it has one, by what people call them."""
    functions: dict[str, Callable[..., Any]] = {
        f"advantage '{advantage}'": advantage_named(advantage),
        f"policy loss '{policy_loss}'": policy_loss_named(policy_loss),
    }
    choice = choice_named(policy_loss)
    return functions if choice is None else functions | {f"the choice of policy loss '{policy_loss}'": choice}


def settings_of(advantage: str, policy_loss: str) -> dict[str, Setting]:
    """Settings of an estimator, a loss and its choice by name.

    Raises:
        UserError: two of them annotate a setting differently.
    """
    return shared_settings(functions_of(advantage, policy_loss))


def shared_settings(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Setting]:
    """Settings of functions that work together, by name.

    A setting that two of them have is one setting, with one value for both: they annotate it equally. Where their
    defaults differ it has none, so that neither wins without a word.

    Args:
        functions: by what people call them.

    Raises:
        UserError: two of them annotate a setting differently, so that its name stands for two things.
    """
    found: dict[str, tuple[str, Setting]] = {}
    for owner, function in functions.items():
        for name, setting in settings(function).items():
            if name in found:
                setting = _shared(*found[name], owner, setting)
            found[name] = (owner, setting)
    return {name: setting for name, (_, setting) in found.items()}


def every_setting() -> dict[str, dict[str, Setting]]:
    """Every setting of functions of ours by its name, and then by the name of each estimator or loss that has it."""
    return _by_owner(ADVANTAGES, POLICY_LOSSES, CHOICES)


def every_preference_setting() -> dict[str, dict[str, Setting]]:
    """Every setting of preference losses of ours by its name, and then by the name of each loss that has it."""
    return _by_owner(PREFERENCE_LOSSES)


def needs(advantage: str, policy_loss: str) -> frozenset[Need]:
    """What an estimator and a loss need beyond rewards and the current log-probs.

    Raises:
        UserError: `NEEDS` of a user's module has a name that is no need.
    """
    modules = (_module(_ADVANTAGE, advantage, advantages.MODULES), _loss_module(policy_loss))
    found = frozenset(need for module in modules for need in getattr(module, "NEEDS", ()))
    if unknown := sorted(found - set(get_args(Need))):
        raise UserError(
            f"NEEDS of '{advantage}' or '{policy_loss}' has '{unknown[0]}', which is no need",
            f"it is a tuple of: {', '.join(get_args(Need))}",
        )
    return found


def is_separable(advantage: str, values: Mapping[str, Any]) -> bool:
    """Whether an estimator may be given the groups of a batch in portions: each by itself, it makes the same of them.

    A file says so with ``SEPARABLE = True``, or with the name of the setting that has to be off.

    Args:
        values: of its settings.
    """
    declared = getattr(_module(_ADVANTAGE, advantage, advantages.MODULES), "SEPARABLE", False)
    return not values.get(declared, True) if isinstance(declared, str) else bool(declared)


def has_ratio(policy_loss: str) -> bool:
    """Whether a loss compares the actor with the generating policy; a file that does not says ``RATIO = False``."""
    return bool(getattr(_loss_module(policy_loss), "RATIO", True))


def is_labelled(preference_loss: str) -> bool:
    """Whether a preference loss takes rows that are good or bad by themselves instead of pairs."""
    return bool(getattr(_preference_module(preference_loss), "LABELLED", False))


def needs_reference(preference_loss: str) -> bool:
    """Whether a preference loss needs log-probs of the model that training started from."""
    return bool(getattr(_preference_module(preference_loss), "REFERENCE", True))


def _by_owner(*tables: Mapping[str, Callable[..., Any]]) -> dict[str, dict[str, Setting]]:
    found: dict[str, dict[str, Setting]] = {}
    for table in tables:
        for owner, function in table.items():
            for name, setting in settings(function).items():
                found.setdefault(name, {})[owner] = setting
    return found


def _shared(owner: str, setting: Setting, other: str, theirs: Setting) -> Setting:
    if setting.annotation != theirs.annotation:
        name, types = setting.name, [inspect.formatannotation(each.annotation) for each in (setting, theirs)]
        raise UserError(
            f"'{name}' is a setting of {owner} ({types[0]}) and of {other} ({types[1]}), and a recipe gives one value",
            f"rename it in one of them, for instance to 'advantage_{name}' or 'loss_{name}'; if it means the same in "
            "both, annotate it equally",
        )
    return setting if setting.default == theirs.default else replace(setting, default=REQUIRED)


def _loss_module(name: str) -> ModuleType:
    return _module(_POLICY_LOSS, name, policy_losses.MODULES)


def _preference_module(name: str) -> ModuleType:
    return _module(_PREFERENCE_LOSS, name, preference.MODULES)


def _module(setting: str, name: str, ours: Mapping[str, ModuleType]) -> ModuleType:
    return module_named(setting, name, "function", _EXAMPLES[setting]) if is_own(name) else ours[name]


def _own(setting: str, spec: str) -> Callable[..., Any]:
    function = import_named(setting, spec, "function", _EXAMPLES[setting])
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not kinds or kinds[0] not in positional or set(kinds[1:]) - {inspect.Parameter.KEYWORD_ONLY}:
        raise UserError(
            f"{setting} '{spec}' must take its inputs as the one argument before a '*', and its settings behind it",
            f"for example: def {spec.partition(':')[2]}(inputs, *, margin=0.5)",
        )
    return function


ALGORITHMS: dict[str, Algorithm] = collect([*advantages.MODULES.values(), *policy_losses.MODULES.values()])

for _advantage, _policy_loss in itertools.product(ADVANTAGES, POLICY_LOSSES):  # any estimator goes with any loss
    settings_of(_advantage, _policy_loss)
