"""The table of held-out figures: first against last, in reading order, with intervals where there are any."""

from __future__ import annotations

from penstock.reports.evaluation import Figure, evaluation_figures, how_sampled, with_interval


def test_first_and_last_evaluation_in_reading_order() -> None:
    """Rewards, several responses, the rest, a user's own; records without an evaluation are passed over."""
    first = {"heldout/accuracy": 0.5, "heldout/accuracy/low": 0.4, "heldout/accuracy/high": 0.6}
    last = {
        "heldout/mine/score": 2.0,
        "heldout/mine/score/low": 1.0,
        "heldout/mine/score/high": 3.0,
        "heldout/truncated_share": 0.0,
        "heldout/best_at_4": 1.0,
        "heldout/response_length_mean": 1234.5,
        "heldout/reward": 0.25,
        "heldout/accuracy": 0.75,
    }
    records = [
        {"iteration": n, "metrics": metrics} for n, metrics in enumerate((first, {"reward/mean": 1.0}, last, {}))
    ]
    assert evaluation_figures(records) == [
        Figure("accuracy", "0.500 (0.400 to 0.600)", "0.750"),
        Figure("mean reward", "–", "0.250"),
        Figure("best@4", "–", "1.000"),
        Figure("response length, tokens", "–", "1,234.5"),
        Figure("truncated, share", "–", "0.000"),
        Figure("mine/score", "–", "2.000 (1.000 to 3.000)"),
    ]


def test_how_the_responses_were_drawn_stands_above_their_figures() -> None:
    """Greedy and sampled accuracies are other figures. Control: without an evaluation nothing is said."""
    sampled = {"heldout/accuracy": 0.5, "heldout/temperature": 0.7}
    greedy = {"heldout/accuracy": 0.5, "heldout/temperature": 0.0}
    records = [{"iteration": number, "metrics": metrics} for number, metrics in enumerate((sampled, greedy))]
    assert evaluation_figures(records) == [
        Figure("responses", "sampled at temperature 0.7", "greedy"),
        Figure("accuracy", "0.500", "0.500"),
    ]
    assert how_sampled({"heldout/temperature": 1.0}) == "sampled at temperature 1"
    assert how_sampled({"reward/mean": 0.5}) == ""


def test_a_run_without_an_evaluation_has_no_table() -> None:
    """Negative control: nothing is made up."""
    assert evaluation_figures([{"iteration": 1, "metrics": {"reward/mean": 0.5}}]) == []
    assert with_interval({}, "heldout/accuracy") == "–"
