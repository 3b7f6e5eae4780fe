"""What is gained by not waiting is reckoned over whole iterations, those that pay for the others included."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks import waiting
from penstock.benchmarks.reporting.halves import file_beside
from penstock.benchmarks.reporting.result import read_result
from penstock.benchmarks.waiting import figures_of, measure
from penstock.benchmarks.workload.slow_environment import seconds_of
from penstock.reports.waiting import Figures, carry_gain, tail_gain

RECIPE = Path("configs/bench_slow_environment.yaml")
CARRIED = ["rollout.tail=null", "environment=null", "rollout.carry={extra: 0.5}"]


def test_a_long_round_pays_for_the_short_ones() -> None:
    """Samples over the sum of seconds, cold iterations and evaluations left out. Control: the median hides the long."""
    seconds = [99.0, 10.0, 10.0, 10.0, 50.0]
    rows = [{"time/iteration_s": value, "rollout/deferred_share": 0.2} for value in seconds]
    rows[2] |= {"time/iteration_s": 13.0, "time/evaluate_s": 3.0}
    figures = figures_of(rows, skip=1, samples=8)
    assert figures["samples_per_s"] == 32 / 80
    assert (figures["iteration_s_mean"], figures["iteration_s_max"]) == (20.0, 50.0)
    assert figures["iteration_s_mean"] > statistics.median(seconds[1:])
    assert figures["deferred_share"] == pytest.approx(0.2)


def test_both_trainings_are_of_the_same_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one differs by the one setting, and may have fewer iterations. A recipe that waits is refused."""
    asked: list[list[str]] = []

    def trained(
        recipe: Path, overrides: Sequence[str], folder: Path, program: str
    ) -> tuple[list[Mapping[str, float]], Any]:
        asked.append(list(overrides))
        return [{"time/iteration_s": 4.0 * len(asked)}] * 3, {}

    monkeypatch.setattr(waiting, "trained", trained)
    out = tmp_path / "waiting.json"
    result = measure(RECIPE, ["seed=3"], "penstock bench waiting", skip=1, synchronous=3, lognormal=False, out=out)
    assert asked == [["seed=3", "rollout.tail=null", "iterations=3"], ["seed=3"]]
    measure(RECIPE, CARRIED, "penstock bench waiting", skip=1, synchronous=None, lognormal=False)
    assert asked[2:] == [[*CARRIED, "rollout.carry=null"], CARRIED]
    assert result.figures["speedup"] == 0.5
    assert result.peers["synchronous"]["samples_per_s"] == 512 / 4.0
    more = ["seed=3", "rollout.tail.extra=0.5"]
    waited = read_result(file_beside(out))  # what is there if the second training does not end
    assert (waited.figures, waited.peers) == (result.peers["synchronous"], {})
    for before in (waited, result):
        again = measure(RECIPE, more, "later", skip=1, synchronous=None, lognormal=False, against=before)
        assert asked.pop() == more and len(asked) == 4
        assert (again.peers, again.peers_command) == (result.peers, "penstock bench waiting")
        assert again.settings["synchronous_iterations"] == 3
        assert again.figures["speedup"] == again.figures["samples_per_s"] / (512 / 4.0)
    # A recipe that carries corrects, and that recipe does not where it waits.
    carried = ["seed=3", "rollout.tail=null", "rollout.carry={extra: 0.5}"]
    measure(RECIPE, carried, "later", skip=1, synchronous=None, lognormal=False, against=result)
    assert asked[4:] == [carried]
    # With room for more than are under way where it waits, it waits likewise. Control: with room for fewer.
    room = [*carried, "rollout.max_sequences={}"]
    roomy, narrow = ([*room[:-1], room[-1].format(places)] for places in (1024, 256))
    measure(RECIPE, roomy, "later", skip=1, synchronous=None, lognormal=False, against=result)
    with pytest.raises(UserError, match="differs in rollout"):
        measure(RECIPE, narrow, "later", skip=1, synchronous=None, lognormal=False, against=result)
    with pytest.raises(UserError, match="differs in seed"):
        measure(RECIPE, [], "later", skip=1, synchronous=None, lognormal=False, against=result)
    with pytest.raises(UserError, match="may end by itself"):
        measure(RECIPE, [], "penstock bench waiting", skip=1, synchronous=None, lognormal=True)
    with pytest.raises(UserError, match="waits for all responses"):
        measure(RECIPE, ["rollout.tail=null"], "penstock bench waiting", skip=1, synchronous=None, lognormal=False)


def test_answers_take_log_normal_seconds_that_follow_from_the_seed() -> None:
    """Half of them the median or less, one in a hundred p99 or more; the same seed again takes the same."""
    seconds = sorted(seconds_of(seed, median_s=1.0, p99_s=20.0, longest_s=60.0) for seed in range(20_000))
    assert seconds[10_000] == pytest.approx(1.0, rel=0.05)
    assert seconds[19_800] == pytest.approx(20.0, rel=0.15)
    assert seconds[-1] == 60.0 > seconds[-100]
    assert seconds_of(7, 1.0, 20.0, 60.0) == seconds_of(7, 1.0, 20.0, 60.0) != seconds_of(8, 1.0, 20.0, 60.0)


@pytest.mark.parametrize(
    ("name", "least", "gain"),
    [("environment_cpu", 2.0, tail_gain), ("tail_1.5b_h200", 1.4, tail_gain), ("carry_small_cpu", 1.3, carry_gain)],
)
def test_what_a_training_expects_of_not_waiting_is_what_was_measured(
    name: str, least: float, gain: Callable[[Figures], float]
) -> None:
    """By the figures of the stored synchronous training, within a quarter of the stored gain."""
    result = read_result(Path(f"benchmarks/results/waiting/waiting_{name}.json"))
    waited = [row for row in result.details if row["mode"] == "synchronous"][result.settings["skipped"] :]
    expected = statistics.median(gain(row) for row in waited)
    assert expected == pytest.approx(result.figures["speedup"], rel=0.25)
    assert result.figures["speedup"] > least
