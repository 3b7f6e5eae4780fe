"""Held-out accuracy of every algorithm: a short training each, by `penstock train` as a user starts it, several seeds.

All trainings of a seed start from the weights of one supervised warm-up, so that they differ in the algorithm alone,
and are asked the same held-out problems, on which none was trained. `TUNED` says what an algorithm has besides its
name, and why. Finished trainings are written at once: the same command goes on where another one stopped.

Left out: what the figures look like on a page (algorithms_page.py).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.algorithms.registry import ALGORITHMS
from penstock.base.errors import UserError
from penstock.benchmarks.accuracy.side_by_side import Ended, side_by_side
from penstock.benchmarks.reporting.machine import machine
from penstock.benchmarks.reporting.result import BenchResult, new_result, read_result, write_result
from penstock.benchmarks.session import describe
from penstock.checks.training import check_supervised, check_training
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.state.run_folder import RunFolder, read_metrics

BENCH = "algorithms"


@dataclass(frozen=True)
class Tuned:
    """What an algorithm has besides its name on this task."""

    overrides: tuple[str, ...]
    reason: str


TUNED: dict[str, Tuned] = {
    "gdpo": Tuned(
        ("reward.function=penstock.benchmarks.accuracy.part_rewards:sum_and_digits",),
        "needs a reward of parts: the sum, and the digits in their places; accuracy is that of the sum",
    ),
    "ippo": Tuned(
        ('data.agents={column: carries, names: ["0", "1", "2"]}',),
        "its three agents: problems with no, one and two carries",
    ),
    "pass_at_k": Tuned(
        ("rollout.prompts=512", "rollout.samples=2"),
        "a right answer teaches only where its group has no other: hardly ever among 8, often among 2",
    ),
    "reinforce_pp": Tuned(
        ("algorithm.kl={place: reward, estimator: k1}",), "its KL penalty belongs in the reward (the paper's equation)"
    ),
}

# What nobody looks at here, and what pays only in longer trainings. Engines that sleep would disturb each other: vLLM
# stops where free memory shrinks meanwhile, which other trainings on the same GPU do to it.
UNRECORDED = (
    "evaluate.every=0",
    "record.samples_every=0",
    "checkpoint.every=0",
    "rollout.cuda_graphs=false",
    "rollout.sleep=false",
)
# Compiling the blocks of a tiny model costs more than its whole training.
EAGER = {"TORCH_COMPILE_DISABLE": "1"}


@dataclass(frozen=True)
class Plan:
    """What to train: each algorithm with each seed, `lanes` at a time; `overrides` are over those of `TUNED`."""

    recipe: Path
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    lanes: int
    overrides: tuple[str, ...] = ()

    def of(self, name: str, seed: int) -> list[str]:
        """Return the overrides of one training."""
        return [*UNRECORDED, f"algorithm.name={name}", *tuned(name), *self.overrides, f"seed={seed}"]


@dataclass
class Found:
    """Rows of finished trainings, and where they are kept."""

    plan: Plan
    command: str
    out: Path | None
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def missing(self) -> list[tuple[str, int]]:
        """Return what is not trained yet, seed by seed: a part of all algorithms says more than all of a part."""
        done = {(row["name"], row["seed"], tuple(row["overrides"])) for row in self.rows}
        wanted = [(name, seed) for seed in self.plan.seeds for name in self.plan.names]
        return [(name, seed) for name, seed in wanted if (name, seed, tuple(tuned(name))) not in done]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row in place of an earlier one of the same algorithm and seed."""
        others = [item for item in self.rows if (item["name"], item["seed"]) != (row["name"], row["seed"])]
        order = list(ALGORITHMS)
        self.rows = sorted([*others, row], key=lambda item: (order.index(item["name"]), item["seed"]))
        if self.out is not None:
            write_result(self.out, self.result())

    def result(self) -> BenchResult:
        """Return what is known so far."""
        return new_result(BENCH, self.command, figures_of(self.rows), settings=self.settings, details=self.rows)


def measure(plan: Plan, command: str, out: Path | None, say: Callable[[str], None]) -> BenchResult:
    """Train what `out` does not hold yet; return accuracies of all.

    Args:
        out: result file, also of an earlier part.
        say: told of each training that ended.

    Raises:
        UserError: a setting is wrong, `out` holds something else, or trainings failed (the others are kept).
    """
    environment = _checked(plan)
    found = Found(plan, command, out, settings_of(plan))
    if out is not None and out.exists():
        found.rows = earlier_rows(out, found.settings)
    missing = found.missing()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        starts = warmed_up(plan, sorted({seed for _, seed in missing}), folder, environment, say)
        failed = _train_all(found, missing, starts, folder, environment, say)
    refuse_failures(failed, len(missing))
    return found.result()


def _checked(plan: Plan) -> dict[str, str]:
    """Check each algorithm's training before any begins; return variables for their processes.

    Raises:
        UserError: there is no such algorithm, or a setting is wrong.
    """
    if unknown := [name for name in plan.names if name not in ALGORITHMS]:
        raise UserError(f"there is no algorithm '{unknown[0]}'", f"choose among {', '.join(ALGORITHMS)}")
    configs = [load_config(plan.recipe, plan.of(name, plan.seeds[0])) for name in plan.names]
    for config in configs:
        check_training(config)
    return variables_of(configs[0])


def variables_of(config: TrainConfig) -> dict[str, str]:
    """Return the variables of a training's process."""
    return EAGER if config.model.tiny is not None else {}


def _train_all(
    found: Found,
    missing: Sequence[tuple[str, int]],
    starts: Mapping[int, Sequence[str]],
    folder: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> list[Ended]:
    """Train the missing pairs and keep their rows; return what failed."""
    pairs = {f"{name}-{seed}": (name, seed) for name, seed in missing}
    commands = {run: _train(found.plan, *pair, starts[pair[1]], folder / run) for run, pair in pairs.items()}
    failed = []
    for count, ended in enumerate(side_by_side(commands, found.plan.lanes, folder, environment), start=1):
        (name, seed), run = pairs[ended.name], RunFolder(folder / ended.name)
        outcome = "failed"
        if ended.code:
            failed.append(ended)
        else:
            row = row_of(name, seed, read_metrics(run), ended.seconds)
            found.add(row)
            outcome = f"{row['accuracy_before']:.1%} to {row['accuracy_after']:.1%}"
        shutil.rmtree(run.path, ignore_errors=True)
        say(f"{name}, seed {seed}: {outcome}, {ended.seconds:.0f} s ({count} of {len(missing)})")
    return failed


def warmed_up(
    plan: Plan, seeds: Sequence[int], folder: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> dict[int, list[str]]:
    """Train the recipe's warm-up once per seed; return the overrides that let a training start from it.

    Raises:
        UserError: a warm-up failed.
    """
    config = load_config(plan.recipe, [*plan.overrides])
    if config.sft is None:
        return {seed: [] for seed in seeds}
    check_supervised(config)
    runs = {f"warm-up-{seed}": folder / f"warm-up-{seed}" for seed in seeds}
    commands = {
        name: ["sft", str(plan.recipe), *plan.overrides, f"seed={seed}", "--run", str(runs[name])]
        for name, seed in zip(runs, seeds, strict=True)
    }
    for ended in side_by_side(commands, plan.lanes, folder, environment):
        refuse_failures([ended] if ended.code else [], len(seeds))
        say(f"{ended.name}: {ended.seconds:.0f} s")
    no_source = ["sft=null", "model.tiny=null"]
    models = {seed: RunFolder(runs[f"warm-up-{seed}"]).model("sft") for seed in seeds}
    return {seed: [*no_source, f"model.path={model}"] for seed, model in models.items()}


def _train(plan: Plan, name: str, seed: int, start: Sequence[str], run: Path) -> list[str]:
    return ["train", str(plan.recipe), *plan.of(name, seed), *start, "--run", str(run)]


def refuse_failures(failed: Sequence[Ended], all_of: int) -> None:
    """Say which of the trainings failed, and how they ended.

    Raises:
        UserError: one of them did.
    """
    if failed:
        ends = "\n".join(f"  {item.name} (exit code {item.code}):\n{item.tail}" for item in failed)
        raise UserError(
            f"{len(failed)} of {all_of} trainings failed, the others are kept:\n{ends}",
            "the same command runs those that are missing",
        )


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return seeds of a list such as `0,1,2`.

    Raises:
        UserError: it is none.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds {text} is no list of numbers", "for example --seeds 0,1,2") from None


def tuned(name: str) -> list[str]:
    """Return what an algorithm has besides its name."""
    return list(TUNED[name].overrides) if name in TUNED else []


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return what all trainings have in common: the recipe without algorithm and seed."""
    config = load_config(plan.recipe, [*UNRECORDED, *plan.overrides])
    kept = {name: value for name, value in describe(config).items() if name not in ("seed", "algorithm")}
    return {
        "recipe": plan.recipe.name,
        "iterations": config.iterations,
        "mini_batches": config.algorithm.mini_batches,
        "heldout_prompts": _heldout(config),
        "heldout_temperature": config.evaluate.temperature,
        **kept,
    }


def _heldout(config: TrainConfig) -> int | None:
    """Return how many held-out prompts are asked, where the configuration alone says it."""
    made = config.data.arithmetic.heldout if config.data.arithmetic is not None else None
    return config.evaluate.prompts or made


def earlier_rows(out: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier part.

    Raises:
        UserError: it is of another benchmark, machine or recipe.
    """
    result = read_result(out)
    if result.bench != BENCH:
        raise UserError(f"{out} is a result of 'bench {result.bench}'", "name another file with --out")
    if result.machine != machine():
        raise UserError(f"{out} was measured on {result.machine}", "name another file with --out")
    if result.settings != settings:
        other = [name for name in settings if result.settings.get(name) != settings[name]]
        raise UserError(f"{out} was measured with another {', '.join(other)}", "name another file with --out")
    return result.details


def row_of(name: str, seed: int, records: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Return a training's row: accuracy before and after, and whether it rose beyond both 95 % intervals."""
    before, after = records[0]["metrics"], records[-1]["metrics"]
    return {
        "name": name,
        "seed": seed,
        "overrides": tuned(name),
        "accuracy_before": before["heldout/accuracy"],
        "accuracy_after": after["heldout/accuracy"],
        "improved": after["heldout/accuracy/low"] > before["heldout/accuracy/high"],
        "iterations": records[-1]["iteration"],
        "seconds": round(seconds, 1),
    }


def figures_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return mean accuracies after training and their standard deviation over seeds, and the mean before."""
    rows = list(rows)
    figures = {"accuracy_before": statistics.mean(row["accuracy_before"] for row in rows)}
    for name in dict.fromkeys(row["name"] for row in rows):
        after = [row["accuracy_after"] for row in rows if row["name"] == name]
        figures[f"accuracy_{name}"] = statistics.mean(after)
        if len(after) > 1:
            figures[f"deviation_{name}"] = statistics.stdev(after)
    return {**figures, "improved_share": sum(row["improved"] for row in rows) / len(rows)}
