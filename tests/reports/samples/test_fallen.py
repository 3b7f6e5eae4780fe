"""What fell between two iterations is found prompt by prompt, with the responses that show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.reports.samples.fallen import compared
from penstock.reports.samples.reading import samples_of
from penstock.state.prompt_rewards import append_prompt_rewards
from penstock.state.run_folder import RunFolder
from tests.reports.samples.played import EVIL, played_run, write
from tests.reports.samples.test_reading import keep_table


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return played_run(tmp_path / "sums")


def test_prompts_that_lost_come_with_a_response_of_each(run: RunFolder) -> None:
    """Of the two prompts in common one lost and one gained; the best before and the worst after are shown."""
    found = compared(run, samples_of(run, 10), samples_of(run, 12), 5)
    assert (found.prompts, found.lost, found.gained) == (2, 1, 1)
    (prompt,) = found.fallen
    assert (prompt.prompt_id, prompt.before, prompt.after, prompt.change) == ("train-000017", 1.0, 0.25, -0.75)
    assert prompt.best_before is not None
    assert prompt.worst_after is not None
    assert (prompt.best_before.response, prompt.worst_after.response) == ("42.", "4")
    figures = {figure.name: (figure.before, figure.after) for figure in found.figures}
    assert figures["reward"] == (0.75, pytest.approx(3.5 / 6))
    assert figures["reward/format"] == (1.0, pytest.approx(2 / 6))
    assert figures["share that was cut"] == (0.0, pytest.approx(1 / 6))
    assert "reward/reward" not in figures


def test_the_other_way_round_the_other_prompt_has_lost(run: RunFolder) -> None:
    """The control."""
    found = compared(run, samples_of(run, 12), samples_of(run, 10), 5)
    assert [(prompt.prompt_id, prompt.change) for prompt in found.fallen] == [("train-000018", -0.5)]


def test_held_out_prompts_are_compared_likewise(run: RunFolder) -> None:
    """One lost what the other gained: the means are equal, and only the prompts tell."""
    found = compared(run, samples_of(run, 0, heldout=True), samples_of(run, 12, heldout=True), 5)
    assert next(figure.change for figure in found.figures if figure.name == "reward") == 0.0
    assert [(prompt.prompt_id, prompt.change) for prompt in found.fallen] == [("heldout-000003", -1.0)]


def test_iterations_without_a_prompt_in_common_have_their_means(run: RunFolder) -> None:
    """And no prompts."""
    write(run, run.experience(11), 11, {40: [(EVIL, 0.0)]})
    found = compared(run, samples_of(run, 11), samples_of(run, 12), 5)
    assert (found.prompts, found.fallen) == (0, [])
    assert next(figure.before for figure in found.figures if figure.name == "reward") == 0.0


def test_where_the_experience_is_gone_the_sampler_remembers(run: RunFolder) -> None:
    """Its memory has every prompt's mean; a response is shown where the table has one. Control: without the memory
    there is the table's only prompt."""
    keep_table(run, 10)
    found = compared(run, samples_of(run, 10), samples_of(run, 12), 5)
    assert (found.prompts, found.lost) == (1, 0)
    append_prompt_rewards(run, 10, [[("train-000017", 1.0), ("train-000018", 0.5)], [("train-000030", 1.0)]])
    found = compared(run, samples_of(run, 10), samples_of(run, 12), 5)
    assert (found.prompts, found.lost, found.gained) == (2, 1, 1)
    (prompt,) = found.fallen
    assert (prompt.prompt_id, prompt.change, prompt.best_before) == ("train-000017", -0.75, None)
    assert prompt.worst_after is not None
