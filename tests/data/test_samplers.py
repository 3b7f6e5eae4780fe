"""Samplers: every prompt where an epoch is promised, easy before hard, and what teaches most more often.

Invariants: a draw depends on its arguments alone; a table that is smaller than a batch is enough; torch is not loaded.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.prompt_selection import SamplerConfig
from penstock.data.order import take
from penstock.data.samplers import SAMPLERS, PromptHistory, load_sampler, require_numbers
from tests.data import sampler_examples

ROOT = Path(__file__).parents[2]
TABLE = pd.DataFrame(
    {
        "prompt_id": [f"train-{row:06d}" for row in range(10)],
        "level": [3, 1, 2, 1, 3, 2, 1, 2, 3, 1],
        "topic": list("aabbaabbab"),
    }
)
NOTHING = PromptHistory(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
CURRICULUM = {"name": "curriculum", "column": "level"}
EXAMPLES = "tests.data.sampler_examples"


def past(*entries: tuple[int, int, float]) -> PromptHistory:
    """A history of (row, iteration, mean reward)."""
    rows, iterations, rewards = zip(*entries, strict=True)
    return PromptHistory(np.array(rows), np.array(iterations), np.array(rewards))


def draw(config: dict[str, Any], count: int, cursor: int = 0, seed: int = 3, **others: Any) -> list[int]:
    """What a sampler draws from `TABLE` in iteration 5 with 4 samples, with other arguments where they are given."""
    arguments = {"table": TABLE, "iteration": 5, "samples": 4, "history": NOTHING} | others
    sampler = load_sampler(SamplerConfig.model_validate(config))
    return sampler.draw({**arguments, "count": count, "cursor": cursor, "seed": seed}).tolist()


@pytest.mark.parametrize("config", [{}, {"name": "sequential"}, CURRICULUM, CURRICULUM | {"descending": True}])
@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_an_epoch_takes_each_prompt_once_however_it_is_cut(config: dict[str, Any], count: int) -> None:
    """From any cursor the sequence goes on as if it had been drawn at once; ten in a row from an epoch's start: all."""
    whole = draw(config, 60)
    for epoch in range(6):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    for cursor in range(0, 60 - count):
        assert draw(config, count, cursor) == whole[cursor : cursor + count]


def test_shuffled_and_sequential_are_the_orders_of_prompts() -> None:
    """Runs that were begun with `data.shuffle` go on with the same prompts."""
    assert draw({}, 25, 7) == take(7, 25, 10, 3, True).tolist()
    assert draw({"name": "sequential"}, 25, 7) == take(7, 25, 10, 3, False).tolist()


def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch() -> None:
    """Ties in an order of their own in every epoch and for every seed. Control: shuffled does not rise."""
    drawn = np.array(draw(CURRICULUM, 40)).reshape(4, 10)
    levels = TABLE["level"].to_numpy()
    assert (levels[drawn] == np.sort(levels)).all()
    assert (levels[draw(CURRICULUM | {"descending": True}, 10)] == np.sort(levels)[::-1]).all()
    assert len({tuple(order) for order in drawn.tolist()}) == 4
    assert draw(CURRICULUM, 10, seed=4) != drawn[0].tolist()
    assert (np.diff(levels[draw({}, 10)]) < 0).any()


# ---- adaptive --------------------------------------------------------------------------------------------------------

ADAPTIVE = {"name": "adaptive"}


def shares(history: PromptHistory, draws: int = 4000, **settings: Any) -> np.ndarray:
    """How often each row of `TABLE` is drawn, one at a time."""
    drawn = [draw(ADAPTIVE | settings, 1, cursor, history=history)[0] for cursor in range(draws)]
    return np.bincount(drawn, minlength=10) / draws


def test_prompts_are_drawn_in_proportion_to_what_they_are_expected_to_teach() -> None:
    """Against the expectation of p (1 - p) by integration over the Beta density, with fading counts."""
    history = past((0, 4, 0.5), (1, 4, 1.0), (2, 4, 0.0), (2, 3, 0.0), (3, 1, 0.25))
    counts = {0: [(2.0, 2.0, 1)], 1: [(4.0, 0.0, 1)], 2: [(0.0, 4.0, 1), (0.0, 4.0, 2)], 3: [(1.0, 3.0, 4)]}
    p = np.linspace(0, 1, 20001)
    expected = []
    for row in range(10):
        successes = sum(good * 0.5 ** (age / 2) for good, _, age in counts.get(row, []))
        failures = sum(bad * 0.5 ** (age / 2) for _, bad, age in counts.get(row, []))
        density = p**successes * (1 - p) ** failures
        expected.append((density * p * (1 - p)).sum() / density.sum())
    assert expected[9] == pytest.approx(1 / 6, rel=1e-4)
    np.testing.assert_allclose(shares(history, half_life=2), np.array(expected) / sum(expected), atol=0.02)


def test_what_was_learnt_long_ago_is_forgotten() -> None:
    """A prompt that always failed comes back; with a long memory it stays away."""
    history = past(*[(0, number, 0.0) for number in range(1, 5)])
    assert shares(history, draws=1500, half_life=0.1)[0] == pytest.approx(0.1, abs=0.03)
    assert shares(history, draws=1500, half_life=1000)[0] < 0.05


def test_rewards_are_read_within_their_range() -> None:
    """-1 and 1 as failure and success: a mean of 0 is the middle, and 5 is no more than success."""
    both = {"reward_range": [-1, 1]}
    middle, success, beyond = (past((0, 4, reward)) for reward in (0.0, 1.0, 5.0))
    assert draw(ADAPTIVE | both, 8, history=success) == draw(ADAPTIVE | both, 8, history=beyond)
    assert draw(ADAPTIVE | both, 8, history=middle) == draw(ADAPTIVE, 8, history=past((0, 4, 0.5)))


def test_an_iteration_does_not_take_a_prompt_twice() -> None:
    """Neither in a rollout nor in a further one, as long as there are others; then all come again."""
    first = draw(ADAPTIVE, 6)
    assert len(set(first)) == 6
    again = draw(ADAPTIVE, 4, cursor=6, history=past(*[(row, 5, 0.5) for row in first]))
    assert set(first) | set(again) == set(range(10))
    assert sorted(draw(ADAPTIVE, 20)) == sorted(2 * list(range(10)))
    earlier = past(*[(row, 4, 0.5) for row in first])
    assert set(draw(ADAPTIVE, 10, cursor=6, history=earlier)[:4]) & set(first), "an earlier iteration's may come"


@pytest.mark.parametrize("name", ["cursor", "seed", "history"])
def test_an_adaptive_draw_depends_on_its_arguments_and_is_pinned(name: str) -> None:
    """The recorded rows: a change here would break the resuming of runs that were begun before it."""
    history = past((7, 4, 0.5), (2, 4, 1.0))
    assert draw(ADAPTIVE, 5, 40, history=history) == draw(ADAPTIVE, 5, 40, history=history) == PINNED
    other = {"cursor": 45, "seed": 4, "history": past(*[(row, 4, 1.0) for row in PINNED])}[name]
    assert draw(**{"config": ADAPTIVE, "count": 5, "cursor": 40, "history": history} | {name: other}) != PINNED


PINNED = [0, 4, 7, 5, 6]


# ---- a user's --------------------------------------------------------------------------------------------------------


def test_a_users_sampler_gets_what_it_asks_for() -> None:
    """The example draws from the topic that lags behind; a setting names its column."""
    custom = {"name": f"{EXAMPLES}:by_topic"}
    history = past(*[(row, 4, float(TABLE["topic"][row] == "a")) for row in range(10)] * 20)
    assert set(TABLE["topic"][draw(custom, 4, history=history)]) == {"b"}
    turned = TABLE.rename(columns={"topic": "area"})
    rows = draw(custom | {"settings": {"column": "area"}}, 4, history=history, table=turned)
    assert rows == draw(custom, 4, history=history)


def test_the_example_is_the_one_in_the_documentation() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    source = inspect.getsource(sampler_examples.by_topic).replace("  # type: ignore[no-untyped-def]", "")
    assert source in page


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("by_topik", {}, r"has no 'by_topik' \(did you mean 'by_topic'\?\)"),
        ("by_topic", {"colum": "area"}, r"data.sampler.settings has 'colum', .* \(did you mean 'column'\?\)"),
        ("asks_for_more", {}, "'temperature', which is neither an argument of samplers nor a setting"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_it_is_called(
    function: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_sampler(SamplerConfig.model_validate({"name": f"{EXAMPLES}:{function}", "settings": settings}))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", r"no 4 row indices from 0 to 9 \(shape \(3,\)"),
        ("beyond", "no 4 row indices from 0 to 9"),
        ("no_rows", "float64"),
        ("raises", r"failed: LookupError: no such topic \(4\)"),
    ],
)
def test_what_is_no_draw_is_the_users_error(function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw({"name": f"{EXAMPLES}:{function}"}, 4)


# ---- before anything starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, None], "data.jsonl, line 2: 'level' is null"),
        (["easy", "hard"], "holds no numbers"),
        ([True, False], "holds no numbers"),
    ],
)
def test_a_column_that_orders_nothing_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_numbers(pd.DataFrame({"level": values}), "level", "data.jsonl")
    require_numbers(TABLE, "level", "data.jsonl")
    with pytest.raises(UserError, match=r"no column 'levle'\n.*did you mean 'level'"):
        require_numbers(TABLE, "levle", "data.jsonl")


def test_every_built_in_name_is_a_sampler() -> None:
    from penstock.configs.sections.prompt_selection import BUILT_IN_SAMPLERS

    assert tuple(SAMPLERS) == BUILT_IN_SAMPLERS


def test_samplers_load_no_torch() -> None:
    code = "import sys, penstock.data.samplers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
