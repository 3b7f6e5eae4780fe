"""`penstock bench algorithms`: what is trained again and what is not, the figures, and the page that shows them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.algorithms.registry import ALGORITHMS
from penstock.base.errors import UserError
from penstock.benchmarks.accuracy import algorithms, side_by_side
from penstock.benchmarks.accuracy.algorithms import TUNED, Plan, figures_of, measure, parse_seeds, row_of
from penstock.benchmarks.accuracy.algorithms_page import rendered, table
from penstock.benchmarks.accuracy.part_rewards import sum_and_digits
from penstock.benchmarks.accuracy.side_by_side import Ended
from penstock.benchmarks.reporting.result import BenchResult, new_result, read_result
from penstock.configs.loading.load import load_config
from penstock.rewards.builtin import exact_match

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "algorithms.md"
RESULT = ROOT / "benchmarks" / "results" / "algorithms" / "algorithms.json"
MORE_STEPS = RESULT.with_name("algorithms_4_mini_batches.json")
PLAN = Plan(ROOT / "configs" / "quickstart.yaml", ("grpo", "gdpo"), (0, 1), 2, ("iterations=3",))


def records(before: float, after: float) -> list[dict[str, Any]]:
    """A training's records as `metrics.jsonl` holds them."""
    return [
        {
            "iteration": iteration,
            "metrics": {
                "heldout/accuracy": value,
                "heldout/accuracy/low": value - 0.02,
                "heldout/accuracy/high": value + 0.02,
            },
        }
        for iteration, value in ((0, before), (3, after))
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_valid_training(name: str) -> None:
    """Before any result is there: the recipe accepts each name with what it is given besides."""
    plan = replace(PLAN, names=(name,))
    config = load_config(plan.recipe, plan.of(name, 7))
    assert (config.algorithm.name, config.seed, config.iterations) == (name, 7, 3)


def test_settings_are_for_algorithms_that_exist() -> None:
    assert set(TUNED) <= set(ALGORITHMS)


class Trainings:
    """Stands for the processes: each command leaves records, or fails; what was asked for is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self.failing = failing
        monkeypatch.setattr(algorithms, "side_by_side", self)
        monkeypatch.setattr(algorithms, "read_metrics", lambda run: records(0.5, 0.6 if run.name[-1] == "0" else 0.51))
        monkeypatch.setattr(algorithms, "check_training", lambda config: None)

    def __call__(self, commands: dict[str, list[str]], lanes: int, folder: Path, environment: Any) -> Any:
        assert environment == {"TORCH_COMPILE_DISABLE": "1"}, "the model is a tiny one"
        for name, arguments in commands.items():
            self.asked.append(name)
            run = Path(arguments[arguments.index("--run") + 1])
            run.mkdir(parents=True)
            if arguments[0] == "train":
                starts = [argument for argument in arguments if argument.startswith("model.path=")]
                assert starts[0].endswith(f"warm-up-{name[-1]}/models/sft")
                assert f"seed={name[-1]}" in arguments
            yield Ended(name, int(name in self.failing), 1.0, "its last line")


def test_what_a_file_holds_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed training is the one that is missing; the others are kept, and one with other settings is run anew."""
    out = tmp_path / "result.json"
    first = Trainings(monkeypatch, failing=["grpo-1"])
    with pytest.raises(UserError, match="1 of 4 trainings failed.*\n.*grpo-1.*\nits last line"):
        measure(PLAN, "a command", out, print)
    assert first.asked == ["warm-up-0", "warm-up-1", "grpo-0", "gdpo-0", "grpo-1", "gdpo-1"]
    assert [(row["name"], row["seed"]) for row in read_result(out).details] == [("gdpo", 0), ("gdpo", 1), ("grpo", 0)]

    again = Trainings(monkeypatch)
    result = measure(PLAN, "a command", out, print)
    assert again.asked == ["warm-up-1", "grpo-1"]
    assert result == read_result(out)
    assert result.figures["accuracy_grpo"] == pytest.approx((0.6 + 0.51) / 2)
    assert result.figures["deviation_grpo"] == pytest.approx(0.09 / 2**0.5)
    assert result.figures["improved_share"] == 0.5, "of seed 1 the intervals overlap"

    nothing = Trainings(monkeypatch)
    assert measure(PLAN, "a command", out, print).details == result.details
    assert nothing.asked == []
    monkeypatch.setitem(TUNED, "grpo", replace(TUNED["gdpo"], overrides=("algorithm.settings.clip_low=0.1",)))
    measure(PLAN, "a command", out, print)
    assert nothing.asked == ["warm-up-0", "warm-up-1", "grpo-0", "grpo-1"]


def test_another_recipe_or_machine_does_not_join_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    Trainings(monkeypatch)
    measure(PLAN, "a command", out, print)
    with pytest.raises(UserError, match="measured with another iterations"):
        measure(replace(PLAN, overrides=("iterations=4",)), "a command", out, print)
    monkeypatch.setattr(algorithms, "machine", lambda: "another")
    with pytest.raises(UserError, match="was measured on CPU"):
        measure(PLAN, "a command", out, print)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="there is no algorithm 'gppo'"):
        measure(replace(PLAN, names=("gppo",)), "a command", None, print)
    with pytest.raises(UserError, match="--seeds 1;2 is no list"):
        parse_seeds("1;2")
    assert parse_seeds("2, 0,2") == (2, 0)


COMMAND = """
import os, pathlib, sys, time
begin = time.monotonic()
time.sleep(float(sys.argv[2]))
assert "PREFECT_API_URL" not in os.environ
lane = pathlib.Path(os.environ["PREFECT_HOME"]).parent.name
store, gpus = os.environ["MLFLOW_TRACKING_URI"], os.environ.get("PENSTOCK_GPU_CLAIMS", "everybody's")
pathlib.Path(sys.argv[1]).write_text(f"{lane} {store} {begin} {time.monotonic()} {gpus}")
print("the last line")
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def instead_of_penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Run COMMAND with the arguments that are for penstock; the processes that were started."""
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    run, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "penstock.cli.main"]
        started.append(run([sys.executable, str(tmp_path / "command.py"), *command[3:]], **options))
        return started[-1]

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(side_by_side.subprocess, "Popen", start)
    return started


@pytest.mark.usefixtures("instead_of_penstock")
def test_commands_share_the_lanes_and_say_how_they_ended(tmp_path: Path) -> None:
    """Never more at a time than lanes; the stores of a lane are its own; a failure keeps what was printed last."""
    commands = {str(number): [str(tmp_path / f"out-{number}"), "0.4", str(int(number == 2))] for number in range(4)}
    ended = {item.name: item for item in side_by_side.side_by_side(commands, 2, tmp_path, {})}
    assert {name: item.code for name, item in ended.items()} == {"0": 0, "1": 0, "2": 1, "3": 0}
    assert ended["2"].tail == "the last line"
    spans = [(tmp_path / f"out-{number}").read_text(encoding="utf-8").split() for number in range(4)]
    for lane in ("lane-0", "lane-1"):
        own = sorted((float(begin), float(end)) for name, _, begin, end, _ in spans if name == lane)
        assert len(own) == 2
        assert own[0][1] < own[1][0], "one after the other"
        assert {store for name, store, *_ in spans if name == lane} == {f"sqlite:///{tmp_path / lane / 'mlflow.db'}"}


@pytest.mark.usefixtures("instead_of_penstock")
@pytest.mark.parametrize(("lanes", "waits"), [(1, True), (2, False)])
def test_lanes_share_gpus(lanes: int, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told of its own trainings alone. Control: a single one waits for a GPU like every training here."""
    monkeypatch.delenv("PENSTOCK_GPU_CLAIMS", raising=False)
    commands = {str(number): [str(tmp_path / f"out-{number}"), "0", "0"] for number in range(2)}
    assert all(item.code == 0 for item in side_by_side.side_by_side(commands, lanes, tmp_path, {}))
    told = {(tmp_path / f"out-{number}").read_text(encoding="utf-8").split(maxsplit=4)[4] for number in range(2)}
    own = {str(tmp_path / f"lane-{lane}" / "gpus") for lane in range(2)}
    assert told == ({"everybody's"} if waits else own)


def test_leaving_early_ends_what_runs(tmp_path: Path, instead_of_penstock: list[subprocess.Popen[bytes]]) -> None:
    """A command that would go on for a minute, beside one that ends by itself."""
    commands = {"fast": [str(tmp_path / "fast"), "0", "0"], "slow": [str(tmp_path / "slow"), "60", "0"]}
    running = side_by_side.side_by_side(commands, 2, tmp_path, {})
    assert next(running).name == "fast"
    assert [process.poll() for process in instead_of_penstock] == [0, None]
    running.close()  # type: ignore[attr-defined]
    assert instead_of_penstock[1].poll() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("response", "right", "digits"), [("046.", 1, 1), (" 046.", 1, 1), ("047.", 0, 0.75), ("0", 0, 0.25), ("", 0, 0)]
)
def test_parts_add_to_nothing_but_the_sum(response: str, right: float, digits: float) -> None:
    """The reward is the quickstart's own, so that an accuracy means the same."""
    parts = sum_and_digits(response, "046", ".")
    assert parts == {"reward": right, "sum": right, "digits": digits}
    assert parts["reward"] == exact_match(response, "046", ".")


def test_the_page_shows_the_result() -> None:
    """Every name has a row, and the table is what the result file and the other tables make of it."""
    page = PAGE.read_text(encoding="utf-8")
    assert set(table(page, "Accuracy")) == set(ALGORITHMS)
    result = read_result(RESULT) if RESULT.exists() else None
    more_steps = read_result(MORE_STEPS) if MORE_STEPS.exists() else None
    assert rendered(page, result, more_steps) == page, "write it anew: penstock bench page"
    if more_steps is not None:
        losses = {ALGORITHMS[row["name"]].policy_loss for row in more_steps.details}
        assert losses == set(POLICY_LOSSES)
        assert more_steps.settings["mini_batches"] > read_result(RESULT).settings["mini_batches"]
    if result is not None:
        assert {(row["name"], row["seed"]) for row in result.details} == {(n, s) for n in ALGORITHMS for s in (0, 1, 2)}


def result_of(afters: dict[str, Sequence[float]], mini_batches: int, temperature: float = 1.0) -> BenchResult:
    """A result in which each algorithm came from 50 % to these accuracies, a seed each."""
    rows = [
        row_of(name, seed, records(0.5, x), 1.0) for name, values in afters.items() for seed, x in enumerate(values)
    ]
    settings = {"iterations": 3, "recipe": "quickstart.yaml", "heldout_prompts": 1000}
    settings |= {"mini_batches": mini_batches, "heldout_temperature": temperature}
    return new_result("algorithms", "a command", figures_of(rows), settings=settings, details=rows)


def test_losses_are_compared_over_the_same_seeds() -> None:
    """Of the many seeds with two steps only those count that were trained with four. Control: no second result."""
    page = PAGE.read_text(encoding="utf-8")
    few, many = result_of({"grpo": (0.7, 0.9), "gspo": (0.6, 0.9)}, 2), result_of({"grpo": (0.8,), "gspo": (0.5,)}, 4)
    text = rendered(page, few, many)
    assert "| `ppo_clip` | `grpo` | `grpo` | 70.0% | 80.0% | 80.0% |" in text
    assert "| `gspo` | `gspo` | `grpo` | 60.0% | 50.0% | 50.0%* |" in text
    assert "seed 0 alone" in text
    assert "Losses differ" not in rendered(text, few)


@pytest.mark.parametrize(("temperature", "how"), [(0.7, "sampled at temperature 0.7"), (0.0, "greedy")])
def test_the_page_says_how_responses_were_drawn(temperature: float, how: str) -> None:
    page = rendered(PAGE.read_text(encoding="utf-8"), result_of({"grpo": (0.7,)}, 2, temperature))
    assert f"1000 held-out problems, {how}, after 3 iterations" in page


def test_a_rendered_page_has_the_figures() -> None:
    """The page before is the control: it says something else."""
    result = result_of({"grpo": (0.8, 0.9, 0.51)}, 2)
    page = PAGE.read_text(encoding="utf-8")
    cells = table(rendered(page, result), "Accuracy")["grpo"]
    assert cells[1:3] == ["73.7% ± 20.3%", "80.0% 90.0% 51.0%*"]
    assert table(page, "Accuracy")["grpo"][1:3] != cells[1:3]
    assert rendered(rendered(page, result), None) == rendered(page, None), "nothing of a result is left"
