"""Loading a reward function: what it is recognised as, and every mistake answered with what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.rewards.function import load_reward_function
from penstock.rewards.types import Sample


def test_parameters_are_filled_by_name() -> None:
    """Builtin names and columns come from the sample, settings are bound, and a lacking column is None."""
    function = load_reward_function("reward_examples:sources", {"bonus": 2}, ["answer", "unused"])
    assert function.wants == ("response", "prompt", "prompt_id", "answer", "row")
    arguments = function.arguments(Sample("s", "2", "3", "4", {"answer": "5"}))
    assert arguments == {"response": "4", "prompt": "3", "prompt_id": "2", "answer": "5", "row": {"answer": "5"}}
    assert function.callable(**arguments) == 4325 + 2
    assert function.arguments(Sample("s", "2", "3", "4", {}))["answer"] is None


def test_a_parameter_has_one_source() -> None:
    """A setting with the name of a column or an argument is refused, else a default holds. Controls: each alone."""
    for name in ("answer", "response"):
        both = (
            rf"'{name}' of reward.function '.*' is a setting \(reward.settings.{name}\) and also an argument or a col"
        )
        with pytest.raises(UserError, match=both):
            load_reward_function("reward_examples:sources", {name: "9"}, ["answer"])
    assert "answer" not in load_reward_function("reward_examples:sources", {"answer": "9"}, []).wants
    assert "bonus" in load_reward_function("reward_examples:sources", {}, ["answer", "bonus"]).wants
    assert "bonus" not in load_reward_function("reward_examples:sources", {}, ["answer"]).wants


@pytest.mark.parametrize(
    ("name", "is_async", "is_batch"),
    [("length", False, False), ("meet", True, False), ("batch", False, True), ("batch_async", True, True)],
)
def test_forms_are_recognised(name: str, is_async: bool, is_batch: bool) -> None:
    """The four forms: one row or many, plain or async."""
    function = load_reward_function(f"reward_examples:{name}", {}, ["answer"])
    assert (function.is_async, function.is_batch) == (is_async, is_batch)


def test_any_setting_fits_a_function_with_keyword_arguments() -> None:
    """`**settings` takes what no parameter names."""
    assert load_reward_function("reward_examples:anything", {"a": 1, "b": 2}, []).callable(response="") == 3


@pytest.mark.parametrize(
    ("spec", "settings", "problem"),
    [
        ("reward_examples.length", {}, "not of the form 'module:function'"),
        ("reward_examples.py:length", {}, r"names a file, not a module(.|\n)*Write reward_examples:length"),
        ("tests/reward_examples:length", {}, "not of the form 'module:function'"),
        ("reward_exampels:length", {}, "No module named 'reward_exampels'(.|\n)*Put reward_exampels.py under /"),
        ("reward_examples:lenght", {}, r"has no 'lenght' \(did you mean 'length'\?\)(.|\n)*It has: .*misbehave"),
        ("reward_examples:NOT_CALLABLE", {}, "is not a function but of type int"),
        ("reward_examples:sources", {}, r"'answer', which .*\(did you mean 'answers'\?\)(.|\n)*response, .*, answers"),
        ("reward_examples:length", {"bonus": 1}, r"has 'bonus', which 'reward_examples:length' does not take"),
        ("reward_examples:sources", {"bonis": 1, "answer": 1}, r"'bonis'.*\(did you mean 'bonus'\?\)"),
    ],
)
def test_mistakes_say_what_to_do(spec: str, settings: dict[str, Any], problem: str) -> None:
    """Every wrong name is answered with what exists, the nearest first."""
    with pytest.raises(UserError, match=problem):
        load_reward_function(spec, settings, ["answers"])


def test_what_is_available_is_listed_once() -> None:
    """A prompt's id is an argument and, in what the trainings make of the data, a column, too."""
    with pytest.raises(UserError, match=r"Available: response, prompt, prompt_id, row, question\."):
        load_reward_function("reward_examples:sources", {}, ["prompt_id", "question"])


def test_a_module_that_fails_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The underlying exception is in the message, also when it is a missing module further down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "needy_reward.py").write_text("import module_that_nobody_has\n")
    with pytest.raises(UserError, match=r"RuntimeError: no licence\n.*python -c 'import broken_reward'"):
        load_reward_function("broken_reward:score", {}, [])
    with pytest.raises(UserError, match=r"'module_that_nobody_has'\n.*python -c 'import needy_reward'"):
        load_reward_function("needy_reward:score", {}, [])


def test_the_working_directory_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder named like a package of ours does not hide it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_reward.py").write_text("def score(response): return 1\n")
    load_reward_function("own_reward:score", {}, [])
    assert sys.path[-1] == str(tmp_path)
