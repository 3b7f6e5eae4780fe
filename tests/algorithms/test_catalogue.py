"""The page that describes the algorithms says what the registry holds: every name, setting and default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS
from algorithms.discovery import settings
from algorithms.kl import KL_ESTIMATORS
from algorithms.policy_losses import CHOICES, POLICY_LOSSES
from algorithms.registry import ALGORITHMS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def rows_after(heading: str) -> dict[str, list[str]]:
    """Cells of the table below a heading, by the name in its first cell."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    return {re.findall(r"`([^`]+)`", row[0])[0]: row for row in rows}


def written(value: Any) -> str:
    """A default as the page writes it: a bare number, a word in lower case."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_row(name: str) -> None:
    algorithm, row = ALGORITHMS[name], rows_after("By name")[name]
    assert row[1] == algorithm.description
    assert row[2].startswith(f"`{algorithm.advantage}`")
    assert row[3].startswith(f"`{algorithm.policy_loss}`")
    assert row[4] == algorithm.aggregation
    for setting, value in algorithm.defaults.items():
        assert f"`{setting}: {written(value)}`" in row[2] + row[3]


@pytest.mark.parametrize(
    ("heading", "name"),
    [("Advantage estimators", name) for name in ADVANTAGES] + [("Policy losses", name) for name in POLICY_LOSSES],
)
def test_every_function_has_a_row_with_its_settings(heading: str, name: str) -> None:
    function = (ADVANTAGES if heading == "Advantage estimators" else POLICY_LOSSES)[name]
    own = settings(function) | (settings(CHOICES[name]) if name in CHOICES else {})
    cell = rows_after(heading)[name][2]
    assert set(re.findall(r"`(\w+)`", cell)) == set(own)
    for setting, value in own.items():
        if value is not None:
            assert f"`{setting}` {written(value)}" in cell, setting


def test_nothing_is_described_that_is_not_there() -> None:
    assert set(rows_after("By name")) == set(ALGORITHMS)
    assert set(rows_after("Advantage estimators")) == set(ADVANTAGES)
    assert set(rows_after("Policy losses")) == set(POLICY_LOSSES)
    assert set(rows_after("Aggregation")) - {"aggregation"} == set(AGGREGATIONS)
    assert all(f"`{estimator}`" in PAGE for estimator in (*KL_ESTIMATORS, "full"))
