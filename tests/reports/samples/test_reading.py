"""Responses are found where they lie, sorted by what they have, and what is missing is answered with what there is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.reports.samples.reading import in_words, iterations_of, rows_of, rows_of_prompt, samples_of
from penstock.state.experience import write_columns
from penstock.state.run_folder import RunFolder
from penstock.trackers.tracker import table_text
from tests.reports.samples.played import EVIL, played_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return played_run(tmp_path / "sums")


def keep_table(run: RunFolder, iteration: int) -> None:
    """Leave of an iteration the table of samples alone, as a training writes it."""
    rows = [{"sample_id": f"{iteration:06d}/train-000018/1", "prompt": "18+25=", "response": "8.", "reward": 1.0}]
    run.samples(iteration).parent.mkdir(exist_ok=True)
    run.samples(iteration).write_text(table_text(rows))
    run.experience(iteration).unlink()


def test_a_response_has_all_that_was_computed_for_it(run: RunFolder) -> None:
    """Reward, parts, the mean advantage of the tokens that count, what was cut, refused and masked."""
    first, evil, _, masked, refused, _ = samples_of(run, 12).at(range(6), tokens=True)
    assert (first.response, first.reward, first.parts, first.remarks) == ("4", 0.0, {"format": 0.0}, ["cut"])
    assert (first.length, first.advantage) == (1, -0.25)
    assert (evil.response, evil.advantage, evil.remarks) == (EVIL, 0.0, [])
    assert masked.remarks == ["1 tokens masked"]
    assert masked.advantage == pytest.approx((0.375 + 0.5) / 2)  # the first of three tokens, 0.25, does not count
    assert refused.remarks == ["refused: nothing is learnt from its prompt"]


@pytest.mark.parametrize(
    ("sort", "highest"),
    [("reward", [2, 3, 5]), ("length", [1, 4, 2]), ("advantage", [3, 2, 5]), ("reward/format", [2, 3, 0])],
)
def test_rows_are_sorted_by_any_figure(run: RunFolder, sort: str, highest: list[int]) -> None:
    """Equal ones stay in the order of the file. Control: reversed, another row comes first."""
    samples = samples_of(run, 12)
    assert rows_of(samples, sort, False, 3) == highest
    assert rows_of(samples, sort, True, 6)[0] != highest[0]
    assert sorted(rows_of(samples, sort, True, 6)) == [0, 1, 2, 3, 4, 5]


def test_without_a_figure_rows_are_spread_over_the_file(run: RunFolder) -> None:
    """And all are shown where there are fewer than wanted."""
    assert rows_of(samples_of(run, 12), None, False, 3) == [0, 2, 4]
    assert rows_of(samples_of(run, 12), None, False, 50) == [0, 1, 2, 3, 4, 5]


def test_the_newest_iteration_that_has_rewards_is_taken(run: RunFolder) -> None:
    """One that is still rolled out is no answer; by name it is refused. So are neighbours of an experience."""
    write_columns(run.experience(13), {"response": ["4"], "prompt": ["?"], "prompt_id": ["train-000001"]})
    write_columns(run.carried(14), {"response": ["4"]})
    assert samples_of(run, None).iteration == 12
    assert iterations_of(run) == [10, 12]
    with pytest.raises(UserError, match="iteration 13 have no rewards yet"):
        samples_of(run, 13)


def test_what_is_missing_is_answered_with_what_there_is(run: RunFolder) -> None:
    """An iteration, an evaluation, a figure, a prompt; and a run without any."""
    keep_table(run, 10)
    with pytest.raises(
        UserError, match=r"of iteration 7\n.*experience of iteration 12 and tables of samples of iteration 10"
    ):
        samples_of(run, 7)
    with pytest.raises(UserError, match=r"held-out responses of iteration 7\n.*evaluations after iterations 0, 12"):
        samples_of(run, 7, heldout=True)
    with pytest.raises(UserError, match=r"no figure 'format'\n.*reward, .*advantage, reward/format"):
        samples_of(run, 12).values("format")
    with pytest.raises(UserError, match=r"no response to prompt 20\n.*17, 18, 19"):
        rows_of_prompt(samples_of(run, 12), 20)
    (run.path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no responses with rewards\n.*penstock train"):
        samples_of(RunFolder(run.path / "empty"), None)


def test_where_the_experience_is_gone_its_table_stands_in(run: RunFolder) -> None:
    """With the columns that it has; what it lacks is refused. Control: beside the experience it is not read."""
    table = {"columns": ["sample_id"], "data": []}
    run.samples(12).parent.mkdir()
    run.samples(12).write_text(json.dumps(table))
    assert not samples_of(run, 12).is_table
    keep_table(run, 10)
    samples = samples_of(run, 10)
    assert samples.is_table
    (response,) = samples.at(rows_of_prompt(samples, 18), tokens=True)
    assert (response.response, response.reward, response.tokens, response.advantage) == ("8.", 1.0, None, None)
    with pytest.raises(UserError, match=r"no figure 'length'\n.*one of: reward"):
        samples.values("length")
    assert iterations_of(run) == [12]


def test_iterations_in_words() -> None:
    """Neighbours together."""
    assert in_words([1]) == "iteration 1"
    assert in_words([1, 2, 3, 6, 8, 9]) == "iterations 1 to 3, 6, 8 to 9"


def test_the_mean_advantage_of_all_rows_is_that_of_each(run: RunFolder) -> None:
    """The figure that rows are sorted by is the one that a row shows, masked tokens left out of both."""
    samples = samples_of(run, 12)
    shown = [response.advantage for response in samples.at(range(6), tokens=True)]
    assert np.allclose(samples.values("advantage"), shown)
