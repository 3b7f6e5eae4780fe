"""Running evaluators: figures under their names, and a user's code that fails fails alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from penstock.evaluators.running import figures_of, run_evaluators
from tests.evaluators.responses import heldout
from tests.processes import alive, noted, owner_of_noted
from tests.waiting import came_true

RESPONSES = heldout([1.0, 0.0], texts=["it is 0", "it is 7"])


def test_built_in_figures_and_a_users_own_stand_side_by_side() -> None:
    """Built-in ones directly under `heldout/`, a user's below its name, with the ends of its interval."""
    figures, failures = run_evaluators(["rewards", "evaluator_examples:RightAnswers"], RESPONSES)
    assert failures == {}
    assert figures["heldout/accuracy"] == 0.5
    assert {name: figures[name] for name in figures if "right" in name} == {
        "heldout/right/share": 0.5,
        "heldout/right/share/low": 0.0,
        "heldout/right/share/high": 1.0,
    }


def test_a_process_that_dies_and_one_that_hangs_are_named_and_the_rest_is_measured() -> None:
    """Neither can be caught where it happens; the evaluator after them still runs."""
    specs = ["evaluator_examples:Exits", "length"]
    figures, failures = run_evaluators(specs, RESPONSES)
    assert failures == {"evaluator_examples:Exits": "its process died (exit code 3)"}
    assert figures["heldout/response_length_mean"] == 3.0
    figures, failures = run_evaluators(["evaluator_examples:Sleeps"], RESPONSES, deadline_s=0.2)
    assert figures == {}
    assert failures == {"evaluator_examples:Sleeps": "took longer than 0.2 s; its process was killed"}


def test_what_an_evaluator_starts_ends_with_it(tmp_path: Path) -> None:
    """Children that got away in every way there is."""
    _, failures = run_evaluators(["evaluator_examples:Leaves"], heldout([1.0, 0.0], texts=[str(tmp_path)] * 2))
    assert failures == {}
    children = noted(tmp_path)
    assert len(children) == 3
    assert not any(map(alive, children))


def test_what_it_raises_is_the_reason() -> None:
    """Across the process boundary."""
    _, failures = run_evaluators(["evaluator_examples:Raises"], RESPONSES)
    assert failures == {"evaluator_examples:Raises": "LookupError: no such thing"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [("ReturnsAList", "returned a list, not a dict"), ("ReturnsOddNames", "'mean@4' cannot be the name of a figure")],
)
def test_what_is_no_figure_is_refused(spec: str, message: str) -> None:
    """A list has no names, and MLflow would refuse the name and with it the whole iteration."""
    with pytest.raises(TypeError, match=message):
        figures_of(f"evaluator_examples:{spec}", RESPONSES)


OWNER = """
import signal
import sys
from penstock.evaluators.running import run_evaluators
from tests.evaluators.responses import heldout

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    run_evaluators(["evaluator_examples:NotesItsProcess"], heldout([1.0], texts=[sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_evaluators_process_ends_with_the_training(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C does not wait for it, and `kill -9` leaves it nowhere, even in a hang in C."""
    with owner_of_noted(tmp_path, OWNER, Path(__file__).parent) as (owner, notes):
        assert came_true(lambda: list(notes.iterdir()), 60)
        (process,) = [int(note.name) for note in notes.iterdir()]
        assert alive(process)
        owner.send_signal(number)
        assert came_true(lambda: owner.poll() is not None, 20)
        assert came_true(lambda: not alive(process), 20)
