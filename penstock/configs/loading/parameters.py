"""Parameters of flows that train, one for each field of their form: all of them from a table of names and keys.

    @flow(...)
    @with_form(PreferenceConfig, fields_of_steps("data.train", "trainer"))
    def preference(config: PreferenceConfig, run_folder: form.RunFolder = None) -> str: ...

Prefect makes its page of the signature, so this is what it gets; the function gets the configuration that was meant.

Left out: what fields say and allow (fields.py), how a configuration comes of them (form.py), `retrain`, whose form is
another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

from penstock.configs.loading import fields as form
from penstock.configs.loading.form import config_from_form
from penstock.configs.tree.section import Recipe

Result = TypeVar("Result")

FIELDS: dict[str, Any] = {
    "name": form.Name,
    "model": form.Model,
    "data": form.Data,
    "iterations": form.Iterations,
    "steps": form.Steps,
    "batch": form.Batch,
    "learning_rate": form.LearningRate,
    "prompts": form.Prompts,
    "samples": form.Samples,
    "seed": form.Seed,
}


def fields_of_steps(data: str, trainer: str) -> dict[str, str]:
    """Return the fields of a training in steps, and their keys.

    Args:
        data: key of what it learns from.
        trainer: section of the model that is trained.
    """
    return {
        "name": "name",
        "model": "model.path",
        "data": data,
        "steps": f"{trainer}.steps",
        "batch": f"{trainer}.batch",
        "learning_rate": f"{trainer}.optimizer.learning_rate",
        "seed": "seed",
    }


def with_form(tree: type[Recipe], keys: Mapping[str, str]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a function whose first parameter is a configuration those of a form in its place.

    Args:
        tree: the configuration's class.
        keys: of `FIELDS` those that the form has, in its order, and the key that each stands for.

    The function has a parameter `resume`, the folder of a run that goes on with its own configuration.
    """

    def formed(function: Callable[..., Result]) -> Callable[..., Result]:
        own = signature(function, eval_str=True)
        advanced: Any = form.Advanced
        types = {"config": advanced[tree], "recipe": form.RecipeFile}
        types |= {name: FIELDS[name] for name in keys} | {"overrides": form.Overrides}
        asked = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
            for name, annotation in types.items()
        ]
        whole = own.replace(parameters=[*asked, *[*own.parameters.values()][1:]])

        @wraps(function)
        def from_form(*arguments: Any, **named: Any) -> Result:
            bound = whole.bind(*arguments, **named)
            bound.apply_defaults()
            given = bound.arguments
            values = {key: given.pop(name) for name, key in keys.items()}
            recipe, overrides, config = (given.pop(name) for name in ("recipe", "overrides", "config"))
            return function(config_from_form(tree, recipe, values, overrides, config, given["resume"]), **given)

        from_form.__signature__ = whole  # type: ignore[attr-defined]
        return from_form

    return formed
