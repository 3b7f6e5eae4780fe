"""Scaling: the same work per GPU on ever more of them, and what share of one GPU's throughput each keeps.

Every count runs in a process of its own, `penstock bench step` or `update`, which sees just that many GPUs. Left out:
recipes that place groups themselves, and several machines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.provenance import commit
from penstock.benchmarks.reporting.machine import kind_of, machine
from penstock.benchmarks.reporting.result import BenchResult, new_result, read_result
from penstock.benchmarks.session import describe
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import visible_gpus

THROUGHPUT = {"step": "response_tokens_per_s_per_gpu", "update": "tokens_per_s_per_gpu"}
DECIDED = ("attention", "recomputed")  # by what the machine has: a difference is no matter of the number of GPUs
COLUMNS = {  # of the table: where the time of each count goes
    "step": ("step_s", "rollout_s", "reward_s", "update_s", "overhead_s"),
    "update": ("update_s", "communication_share", "tokens_per_s_per_gpu"),
}


def parse_counts(text: str | None) -> list[int]:
    """Return numbers of GPUs in rising order; by default 1, 2, 4, ... up to all of them (1 and 2 CPU ranks).

    Raises:
        UserError: no list of numbers, or more than there are GPUs.
    """
    gpus = len(visible_gpus())
    if text is None:
        return [2**power for power in range(10) if 2**power <= (gpus or 2)]
    if not all(part.strip().isdigit() and int(part) for part in text.split(",")):
        raise UserError(f"--gpus is '{text}'", "give numbers with commas, e.g. 1,2,4,8")
    counts = sorted({int(part) for part in text.split(",")})
    if gpus and counts[-1] > gpus:
        raise UserError(f"--gpus asks for {counts[-1]} GPUs, {gpus} are visible", "ask for fewer")
    return counts


def measure(
    recipe: Path, overrides: list[str], command: str, *, counts: Sequence[int], what: str, skip: int, one: Path | None
) -> BenchResult:
    """Run the benchmark `what` once per count, with the recipe's prompts times the count.

    Args:
        one: result of `what` on one GPU, measured before; one GPU is not measured again then.

    Raises:
        UserError: the recipe is wrong or places groups, one of the runs failed, or `one` is of another recipe, kind of
            GPU or commit.
    """
    config = load_config(recipe, overrides)
    if config.groups:
        raise UserError("the recipe places its groups itself", "remove the groups section, or add groups=null")
    results = {} if one is None else {1: _measured(one, what, config)}
    counts = sorted({*results, *counts})
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        for count in counts:
            if count in results:
                continue
            out = Path(scratch) / f"{count}.json"
            arguments = [what, str(recipe), *overrides, *placement(config, count), "--skip", str(skip)]
            _run([*arguments, "--out", str(out)], count)
            results[count] = read_result(out)
    shares = efficiency({count: result.figures[THROUGHPUT[what]] for count, result in results.items()})
    return new_result(
        "scaling",
        command,
        {"scaling_efficiency": shares[counts[-1]], **{f"scaling_efficiency_{n}": shares[n] for n in counts[1:]}},
        settings={"what": what, "gpus": list(counts), "skipped": skip, **describe(config)},
        details=[
            {"gpus": count, "scaling_efficiency": shares[count], **result.figures, **decided(result)}
            for count, result in results.items()
        ],
    )


def decided(result: BenchResult) -> dict[str, object]:
    """Return what a result says that its machine decided."""
    return {name: result.settings[name] for name in DECIDED if name in result.settings}


def _measured(path: Path, what: str, config: TrainConfig) -> BenchResult:
    """Return a result on one GPU.

    Raises:
        UserError: it is of another benchmark, recipe, kind of GPU or commit.
    """
    result = read_result(path)
    if result.bench != what:
        raise UserError(f"{path} is a result of '{result.bench}', not of '{what}'", "name another file, or --what")
    if other := [name for name, section in describe(config).items() if result.settings.get(name) != section]:
        raise UserError(
            f"{path} was measured with another recipe: '{other[0]}' differs", "measure it with the same recipe"
        )
    here = (kind_of(machine()), commit())
    if (there := (kind_of(result.machine), result.commit)) != here:
        raise UserError(
            f"{path} was measured on another kind of GPU or commit: {_shown(there)}, here {_shown(here)}",
            "leave --one away: one GPU of this machine is measured then",
        )
    return result


def _shown(origin: tuple[str, str | None]) -> str:
    kind, hashed = origin
    return f"{kind} at {(hashed or 'no commit')[:9]}"


def efficiency(throughput: Mapping[int, float]) -> dict[int, float]:
    """Return each count's throughput per GPU over that of the smallest count."""
    return {count: value / throughput[min(throughput)] for count, value in throughput.items()}


def placement(config: TrainConfig, count: int) -> list[str]:
    """Return the overrides for `count` GPUs: their share of the work, and CPU ranks where there is no GPU."""
    group = {"ranks": count, "roles": list(config.roles)}
    ranks = [] if visible_gpus() else [f"groups.main={json.dumps(group)}"]
    return [f"rollout.prompts={config.rollout.prompts * count}", *ranks]


def _run(arguments: list[str], count: int) -> None:
    environment = os.environ.copy()
    if visible_gpus():
        outer = environment.get("CUDA_VISIBLE_DEVICES")
        names = outer.split(",") if outer else [str(index) for index in range(count)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[:count])
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "bench", *arguments], env=environment, check=False
    )
    if ended.returncode:
        raise UserError(f"the run on {count} GPUs ended with exit code {ended.returncode}", "its messages are above")
