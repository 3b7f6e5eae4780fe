"""Evaluators by name: built-in ones, a user's class, and every mistake answered with what to do."""

from __future__ import annotations

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.run import BUILT_IN_EVALUATORS, EvaluateConfig
from penstock.evaluators.loading import BUILT_IN, load_evaluator, load_evaluators


def test_the_schema_names_those_that_exist() -> None:
    """The configuration does not import them, so the two lists are compared here; each goes by its own name."""
    assert tuple(BUILT_IN) == BUILT_IN_EVALUATORS
    assert [load_evaluator(name).name for name in BUILT_IN] == list(BUILT_IN)


def test_a_class_of_the_working_directory_is_an_evaluator() -> None:
    """Beside the built-in ones, in the order of the recipe."""
    specs = EvaluateConfig(evaluators=["length", "evaluator_examples:RightAnswers"]).evaluators
    assert [evaluator.name for evaluator in load_evaluators(specs).values()] == ["length", "right"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("evaluator_examples:", r"is not of the form 'module:class'"),
        ("no_such_module:X", r"does not import: ModuleNotFoundError(.|\n)*Put no_such_module.py under"),
        ("evaluator_examples:RightAnswer", r"did you mean 'RightAnswers'\?"),
        ("evaluator_examples:NUMBER", r"is not a class but of type int"),
        ("evaluator_examples:AsksForMore", r"cannot be made: TypeError(.|\n)*called without arguments"),
        ("evaluator_examples:WithoutName", r"has no usable 'name'"),
        ("evaluator_examples:WithoutMethod", r"has no method 'evaluate'"),
    ],
)
def test_what_is_no_evaluator_is_refused_before_the_run(spec: str, message: str) -> None:
    """The message names the setting, the class and the remedy."""
    with pytest.raises(UserError, match=message) as caught:
        load_evaluators(["rewards", spec])
    assert "evaluate.evaluators" in str(caught.value)


def test_two_evaluators_of_one_name_are_refused() -> None:
    """One would overwrite the figures of the other."""
    with pytest.raises(UserError, match="two evaluators have the name 'right'"):
        load_evaluators(["evaluator_examples:RightAnswers", "evaluator_examples:SameName"])
