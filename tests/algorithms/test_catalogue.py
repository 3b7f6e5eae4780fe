"""The tables that describe the algorithms say what the registry holds: every name, setting and default.

That the page has these tables as they are made is checked in tests/benchmarks/accuracy/test_algorithms.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.algorithms import catalogue
from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.aggregation import AGGREGATIONS
from penstock.algorithms.declarations.settings import settings
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.registry import (
    ALGORITHMS,
    every_preference_setting,
    every_setting,
    is_labelled,
    shared_settings,
)
from penstock.benchmarks.accuracy.algorithms_page import table

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_row(name: str) -> None:
    algorithm, row = ALGORITHMS[name], table(PAGE, "By name")[name]
    assert row[1] == algorithm.description
    assert row[2].startswith(f"`{algorithm.advantage}`")
    assert row[3].startswith(f"`{algorithm.policy_loss}`")
    assert row[4:6] == [algorithm.aggregation, algorithm.paper]
    assert algorithm.paper
    for setting, value in algorithm.defaults.items():
        assert f"`{setting}: {catalogue.written(value)}`" in row[2] + row[3]


@pytest.mark.parametrize(
    ("heading", "name"),
    [("Advantage estimators", name) for name in ADVANTAGES] + [("Policy losses", name) for name in POLICY_LOSSES],
)
def test_every_function_has_a_row_with_its_settings(heading: str, name: str) -> None:
    function = (ADVANTAGES if heading == "Advantage estimators" else POLICY_LOSSES)[name]
    own = shared_settings({name: function, **({"its choice": CHOICES[name]} if name in CHOICES else {})})
    _, formula, cell, _ = table(PAGE, heading)[name]
    assert formula.endswith(".")
    assert cell.count("`") == 2 * len(own)
    for setting in own.values():
        assert f"`{setting.name}` {catalogue.written(setting.default)}" in cell


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_preference_loss_has_a_row(name: str) -> None:
    row, own = table(PAGE, "Preference losses")[name], settings(PREFERENCE_LOSSES[name])
    assert row[1].endswith(".")
    assert row[2] == ("rows with a label" if is_labelled(name) else "pairs")
    assert row[5]
    for setting in own.values():
        assert f"`{setting.name}` {catalogue.written(setting.default)}" in row[4]
    assert row[4].count("`") == 2 * len(own)


def test_every_setting_is_described_and_typed() -> None:
    """A form, the list of keys and the page show it. Control: of the inputs, which are no setting, nothing is there."""
    for heading, every in (
        ("Settings", every_setting()),
        ("Settings of preference losses", every_preference_setting()),
    ):
        rows = table(PAGE, heading)
        assert set(rows) == set(every)
        assert "inputs" not in rows
        for name, owners in every.items():
            assert all(setting.description and setting.annotation for setting in owners.values()), name
            assert all(f"{owner} " in rows[name][2] for owner in owners)


def test_nothing_is_described_that_is_not_there() -> None:
    assert set(table(PAGE, "By name")) == set(ALGORITHMS)
    assert set(table(PAGE, "Advantage estimators")) == set(ADVANTAGES)
    assert set(table(PAGE, "Policy losses")) == set(POLICY_LOSSES)
    assert set(table(PAGE, "Preference losses")) == set(PREFERENCE_LOSSES)
    assert set(table(PAGE, "Aggregation")) - {"aggregation"} == set(AGGREGATIONS)
    assert all(f"`{estimator}`" in PAGE for estimator in (*KL_ESTIMATORS, "full"))


def test_a_bar_in_a_cell_is_no_border() -> None:
    """Markdown would read one more column. Control: the other cell."""
    head, _, row = catalogue.table(("a", "b"), [("|x|", "``y``")])
    assert (head, row) == ("| a | b |", r"| \|x\| | `y` |")
