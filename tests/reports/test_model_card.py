"""A model card has the figures of its own iteration, and front matter that parses."""

from __future__ import annotations

import yaml

from penstock.reports.model_card import ModelFacts, figures_until, model_card

RECORDS = [
    {"iteration": 0, "metrics": {"heldout/accuracy": 0.25}},
    {"iteration": 1, "metrics": {"reward/mean": 0.5}},
    {"iteration": 2, "metrics": {"reward/mean": 0.75, "heldout/accuracy": 0.5, "heldout/temperature": 1.0}},
    {"iteration": 3, "metrics": {"reward/mean": 0.875, "heldout/accuracy": 0.625}},
]


def test_figures_are_those_until_the_iteration_of_the_weights() -> None:
    """A checkpoint behind the last recorded iteration gets no figure of a later policy."""
    assert figures_until(RECORDS, 2) == {
        "iterations": 2,
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "heldout_temperature": 1.0,
        "reward_first": 0.5,
        "reward_last": 0.75,
    }
    assert figures_until(RECORDS, 3)["reward_last"] == 0.875
    assert figures_until(RECORDS, 1)["accuracy_after"] is None


def test_the_card_says_where_the_model_comes_from() -> None:
    """Front matter for a hub, and what was trained, how, and with which result."""
    facts = ModelFacts(
        name="sums",
        base_model="Qwen|1.5B",
        algorithm="grpo",
        seed=7,
        figures=figures_until(RECORDS, 3),
        check="float32; 36 tensors equal",
        versions={"torch": "2.11"},
        commit=None,
        links={"MLflow run": "abc"},
    )
    _, front, body = model_card(facts).split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["penstock", "reinforcement-learning", "grpo"]
    for line in (
        "| Base model | Qwen\\|1.5B |",
        "25.0% → 62.5% +37.5 points, sampled at temperature 1",
        "| Seed | 7 |",
        "torch 2.11.",
        "- MLflow run: `abc`",
    ):
        assert line in body
    assert "commit" not in body
