"""The page of `penstock bench families`. What it measures is tests/engines/families/test_every_family.py's."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.families.measuring import measure, with_rows_of
from penstock.benchmarks.families.page import BEGIN, END, read_page, rendered
from penstock.benchmarks.reporting.result import BenchResult, read_result
from penstock.benchmarks.workload.families import FAMILIES, REFUSED
from tests.processes import ROOT

PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "families" / "families_cpu.json"


def test_the_page_has_the_figures_that_were_measured() -> None:
    """Of every family, trained or refused. Control: a figure that changes changes the page."""
    page, result = read_page(PAGE), read_result(RESULT)
    assert rendered(page, result) == page, "write it anew: penstock bench families --page docs/models.md"
    refused = {row["family"] for row in result.details if "refused" in row}
    assert [row["family"] for row in result.details] == [*FAMILIES] and refused == {*REFUSED}
    first = {**result.details[0], "rollout": 0.5}
    assert rendered(page, result.model_copy(update={"details": [first, *result.details[1:]]})) != page


def test_where_all_are_trained_no_table_says_what_is_refused() -> None:
    result = read_result(RESULT)
    page = rendered(f"before\n{BEGIN}old\n{END} after", result.model_copy(update={"details": result.details[:1]}))
    assert page.startswith(f"before\n{BEGIN}| family |") and page.endswith(f"{END} after")
    assert len(page.splitlines()) == 6 and "refused" not in page


def test_a_page_without_a_place_and_a_folder_without_a_model_are_mistakes(tmp_path: Path) -> None:
    """Before anything starts."""
    with pytest.raises(UserError, match="no page with a place for the table"):
        read_page(tmp_path / "none.md")
    with pytest.raises(UserError, match="has no config.json"):
        measure("penstock bench families none", [str(tmp_path / "none")])


def test_what_is_measured_is_kept_at_once() -> None:
    """Should the rest be cut off: after each model there is a result of those so far. Control: the last one has all."""
    kept: list[BenchResult] = []
    names = list(REFUSED)[:2]  # which start no ranks
    result = measure("penstock bench families", names, kept.append)
    assert [len(so_far.details) for so_far in kept] == [1, 2] and kept[-1].details == result.details
    assert [row["family"] for row in result.details] == names


def test_a_result_keeps_the_rows_of_what_was_measured_before() -> None:
    """In the table's order, with figures of all. Control: what is measured again is replaced, a folder comes last."""
    whole = read_result(RESULT)
    again, folder = {**whole.details[1], "packed": 0.5}, {**whole.details[0], "family": "models/ours"}
    both = with_rows_of(whole, whole.model_copy(update={"details": [folder, again]}))
    assert both.details == [whole.details[0], again, *whole.details[2:], folder]
    assert both.figures["families"] == whole.figures["families"] + 1 and both.figures["packed_max"] == 0.5
    assert both.figures["refused"] == whole.figures["refused"]
