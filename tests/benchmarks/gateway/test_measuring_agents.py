"""An agent's rollouts are measured beside those of the recipe's own environment, on the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.gateway import measuring
from penstock.benchmarks.gateway.measuring import measure

RECIPE = Path("configs/calculator.yaml")
INSIDE, AGENT = "penstock.environments.calculator:Calculator", "penstock.environments.calculator:CalculatorAgent"


def test_both_ways_are_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by who asks, and the result says whether tokens did. Control: of other tokens it says so, too."""
    asked: list[list[str]] = []
    tokens = [900.0]

    def trained(recipe: Path, overrides: Sequence[str], folder: Path) -> tuple[list[Mapping[str, float]], Any]:
        asked.append(list(overrides))
        row = {"rollout/tokens": tokens[len(asked) % len(tokens)], "rollout/turns_mean": 1.5, "reward/mean": 0.5}
        return [{**row, "rollout/tokens_per_s": 1000.0 / len(asked)}] * 3, {}

    monkeypatch.setattr(measuring, "trained", trained)
    result = measure(RECIPE, ["iterations=3"], "penstock bench gateway", agent=AGENT, skip=1)
    inside, over_http = asked
    assert over_http == [*inside, f"environment.type={AGENT}"] and "iterations=3" in inside
    assert result.figures["share_of_inside"] == 0.5
    assert result.settings["same_tokens"] is True and result.settings["samples"] == 512
    tokens.append(901.0)
    assert measure(RECIPE, ["iterations=3"], "again", agent=AGENT, skip=1).settings["same_tokens"] is False


@pytest.mark.parametrize(
    ("others", "agent", "said"),
    [
        ([f"environment.type={AGENT}"], AGENT, "no environment that answers"),
        ([], INSIDE, "does not ask the policy"),
    ],
)
def test_what_cannot_be_compared_is_refused(others: list[str], agent: str, said: str) -> None:
    """Before anything starts. Control: above."""
    with pytest.raises(UserError, match=said):
        measure(RECIPE, ["iterations=3", *others], "penstock bench gateway", agent=agent, skip=1)
