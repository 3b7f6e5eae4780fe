"""Mistakes in naming an environment are found before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.loading import is_async, load_environment, stop_texts


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Misbehavs", {}, "did you mean 'Misbehaves'"),
        ("Misbehaves", {"facto": 1}, "cannot be made: TypeError"),
        ("WithoutStep", {}, "has no method 'step'"),
        ("WrongStop", {}, "has a 'stop' of"),
    ],
)
def test_refusals(name: str, settings: dict[str, Any], message: str) -> None:
    """Each says which setting is wrong."""
    with pytest.raises(UserError, match=message) as caught:
        load_environment(EnvironmentConfig(type=f"environment_examples:{name}", settings=settings))
    assert "environment.type" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"), [("Misbehaves", False), ("MisbehavesAsync", True), ("HalfAsync", True), ("Waits", True)]
)
def test_one_method_that_is_async_is_enough(name: str, expected: bool) -> None:
    """Also an inherited one."""
    make = load_environment(EnvironmentConfig(type=f"environment_examples:{name}"))
    assert is_async(make()) == expected


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("penstock.environments.calculator:Calculator", {}),
        ("penstock.environments.games.checked_sums:CheckedSums", {"agents": ["solver", "checker"]}),
    ],
)
def test_several_paths_are_an_agents(kind: str, others: dict[str, Any]) -> None:
    """Whose episode may be several conversations. Control: an agent has them, and one path is anybody's."""
    with pytest.raises(UserError, match="'environment.max_paths' has no effect"):
        load_environment(EnvironmentConfig(type=kind, max_paths=2, **others))
    load_environment(EnvironmentConfig(type=kind, max_paths=1, **others))
    load_environment(EnvironmentConfig(type="penstock.environments.calculator:CalculatorAgent", max_paths=2))


def test_every_episode_gets_an_object_of_its_own() -> None:
    """With the settings; the texts that end a turn are a tuple."""
    make = load_environment(EnvironmentConfig(type="environment_examples:Misbehaves", settings={"factor": 3}))
    one, other = make(), make()
    assert one is not other
    assert one.factor == 3  # type: ignore[attr-defined]
    assert stop_texts("x", one) == ("!",)
