"""Models side by side: paired differences and the table that shows them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from penstock.evaluators.bootstrap import with_intervals
from penstock.reports.evaluations import Evaluated, as_json, difference, page_of, table_of


def evaluated(label: str, values: dict[str, float], figure: str = "heldout/reward") -> Evaluated:
    """A model with a value for each prompt."""
    prompts = pd.DataFrame({"figure": figure, "prompt": list(values), "value": list(values.values())})
    return Evaluated(label, with_intervals({figure: prompts["value"].to_numpy()}), prompts)


def two_models(prompts: int = 200) -> tuple[Evaluated, Evaluated]:
    """Prompts of very different difficulty, for which the second model is a little better on each."""
    hard = np.random.default_rng(0).uniform(0, 10, prompts)
    names = [f"heldout-{row:06d}" for row in range(prompts)]
    first = evaluated("first", dict(zip(names, hard, strict=True)))
    better = evaluated("better", dict(zip(names[::-1], hard[::-1] + 0.1, strict=True)))
    return first, better


def test_a_small_difference_on_each_prompt_is_sure() -> None:
    """What makes prompts hard for both cancels. Control: the models' own intervals overlap almost wholly."""
    first, better = two_models()
    found = difference(better, first)
    assert found["heldout/reward"] == pytest.approx(0.1)
    assert found["heldout/reward/low"] == pytest.approx(0.1)
    assert found["heldout/reward/high"] == pytest.approx(0.1)
    assert first.figures["heldout/reward/high"] > better.figures["heldout/reward/low"] + 0.5


def test_only_prompts_that_both_have_answered_count() -> None:
    """A prompt too long for one tokenizer is dropped there."""
    first, other = evaluated("first", {"a": 0.0, "b": 1.0, "c": 5.0}), evaluated("other", {"c": 9.0, "a": 1.0})
    assert difference(other, first)["heldout/reward"] == pytest.approx(2.5)


def test_a_model_differs_from_itself_by_nothing() -> None:
    """Bit for bit."""
    first, _ = two_models()
    assert set(difference(first, first).values()) == {0.0}


def test_the_table_has_models_differences_and_tasks() -> None:
    """A column for each; figures without values per prompt have no difference, and ends of intervals no row."""
    first, better = two_models()
    tasks = {"arc_easy/acc": 0.6, "arc_easy/acc/low": 0.5, "arc_easy/acc/high": 0.7}
    named = Evaluated("better", {**better.figures, **tasks, "heldout/temperature": 0.0}, better.prompts)
    table = table_of([first, named])
    assert list(table.columns) == ["first", "better", "better - first"]
    assert list(table.index) == ["responses", "mean reward", "arc_easy/acc"]
    assert table.loc["arc_easy/acc"].tolist() == ["–", "0.600 (0.500 to 0.700)", "–"]
    assert table.loc["mean reward", "better - first"] == "0.100 (0.100 to 0.100)"
    assert table.loc["responses"].tolist() == ["", "greedy", ""]
    page = page_of([first, named], {"recipe": "sums.yaml"})
    assert "| better - first" in page
    assert page.endswith("- recipe: sums.yaml\n")
    assert as_json([first, named])["differences"]["to"] == "first"
