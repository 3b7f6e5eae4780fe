"""Samples per second of a recipe whose rollouts do not wait for their longest responses, beside its synchronous twin.

Two trainings as a user starts them (penstock/benchmarks/step.py), of the same work: the recipe, and the recipe without
`rollout.tail`, `rollout.carry` or `rollout.stream`. What counts is the time of all iterations after the first few, not
a median, because rounds differ: of those that put prompts off some pay for the others. The twin comes first and is kept
(penstock/benchmarks/reporting/halves.py). Left out: what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.halves import RECIPE, Half, differing, rows_of, scratch_folder
from penstock.benchmarks.reporting.machine import machine
from penstock.benchmarks.reporting.result import BenchResult, new_result, steady
from penstock.benchmarks.session import describe
from penstock.benchmarks.step import PROGRAM, trained
from penstock.benchmarks.workload.prompts import with_prompts
from penstock.configs.loading.load import load_config

MODES = ("tail", "carry", "stream")  # keys of `rollout`
SYNCHRONOUS = "synchronous"  # the training that waits for all
UNEVEN = "penstock.benchmarks.ranks.uneven_training"
FIGURES = {
    "deferred_share": "rollout/deferred_share",
    "unused_share": "rollout/unused_share",
    "staleness_mean": "rollout/staleness_mean",
    "off_policy_share": "rollout/off_policy_share",
    "engine_wait_share": "rollout/engine_wait_share",
    "rollout_s": "time/rollout_s",
    "update_actor_s": "time/update_actor_s",
    "portion_wait_s": "rollout/portion_wait_s",
    "portion_after_s": "rollout/portion_after_s",
    "batch_wait_s": "rollout/batch_wait_s",
    "engine_pause_s": "rollout/engine_pause_s",
    "reshard_s": "time/reshard_s",
    "response_length_mean": "rollout/response_length_mean",
    "response_length_max": "rollout/response_length_max",
}


def measure(
    recipe: Path,
    overrides: list[str],
    command: str,
    *,
    skip: int,
    synchronous: int | None,
    lognormal: bool,
    against: BenchResult | None = None,
    out: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> BenchResult:
    """Train both ways; return samples per second after the first `skip` iterations, and their ratio.

    Args:
        synchronous: iterations of the synchronous training; None: as many as the recipe has.
        lognormal: whether responses end as those of a reasoning model (penstock/benchmarks/ranks/uneven_rank.py).
        against: a result of this benchmark whose synchronous training is not repeated.
        out: the result's file, beside which the synchronous training is kept once it has ended; what an earlier
            command has kept there is not repeated, and may be `against` of another one.
        say: told where that is, and where a training is that was cut off.

    Raises:
        UserError: the recipe is wrong or waits for all, too few iterations are asked for, a training failed, or
            `against`, or what is kept, is of other work or another machine.
    """
    config = load_config(recipe, overrides)
    waits = [f"rollout.{mode}=null" for mode in MODES if getattr(config.rollout, mode) is not None]
    if not waits:
        raise UserError(f"{recipe} waits for all responses", "give rollout.tail, e.g. rollout.tail.extra=0.25")
    if lognormal and not config.rollout.ignore_eos:
        raise UserError(f"in {recipe} a response may end by itself", "give rollout.ignore_eos=true")
    lengths = {"lengths": "log-normal" if lognormal else "the model's"}
    fewer = [] if synchronous is None else [f"iterations={synchronous}"]
    twin = load_config(recipe, [*overrides, *waits, *fewer])
    if against is not None:
        _check_same(against, [{**lengths, **describe(of)} for of in (config, twin)])
    program = UNEVEN if lognormal else PROGRAM
    for count in (config.iterations, twin.iterations):
        steady(range(count), skip)
    half = Half("waiting", SYNCHRONOUS, twin, command, out, lengths)
    against = against or half.ended()
    samples = config.rollout.prompts * config.rollout.samples
    with scratch_folder(say) as scratch:
        overrides = [*overrides, *with_prompts(config, scratch)]
        others: Sequence[Mapping[str, float]]
        if against is not None:
            others = [row for row in against.details if row["mode"] == SYNCHRONOUS]
        else:
            others, _ = trained(recipe, [*overrides, *waits, *fewer], scratch / SYNCHRONOUS, program)
        peer = figures_of(others, skip, samples)
        if against is None:
            half.keep(peer, others)
        say(half.told(scratch / "recipe"))
        rows, _ = trained(recipe, overrides, scratch / "recipe", program)
    figures = figures_of(rows, skip, samples)
    return new_result(
        "waiting",
        command,
        {**figures, "speedup": figures["samples_per_s"] / peer["samples_per_s"]},
        peers={SYNCHRONOUS: peer},
        peers_command=command if against is None else against.peers_command or against.command,
        settings={
            "iterations": len(rows),
            "synchronous_iterations": len(others),
            "skipped": skip,
            **lengths,
            **describe(config),
        },
        details=[*rows_of("recipe", rows), *rows_of(SYNCHRONOUS, others)],
    )


def _check_same(against: BenchResult, works: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless a result is of one of these works on such a machine, whichever way it did not wait.

    `works`: the recipe, and the recipe that waits: without a way not to wait it has no correction of its own accord.
    """
    if against.bench != "waiting" or against.machine != machine():
        raise UserError("the result to compare with is not of this benchmark and machine", "leave out --against")
    others = [_differing(work, against.settings) for work in works]
    if all(others):
        nearest = min(others, key=len)
        raise UserError(f"the result to compare with differs in {', '.join(nearest)}", "leave out --against")


def _differing(work: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return in what a work differs from that of a result, but for how often and how it does not wait."""
    asked, measured = ({**of, "rollout": _that_waits(of["rollout"])} for of in (work, settings))
    for name in ("iterations", "synchronous_iterations", "skipped", RECIPE):
        measured.pop(name, None)
    return differing(asked, measured)


def _that_waits(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a rollout as they are where it waits: with room for all, more room changes nothing."""
    waiting = {**rollout, **dict.fromkeys(MODES)}
    if (waiting["max_sequences"] or 0) >= rollout["prompts"] * rollout["samples"]:
        waiting["max_sequences"] = None
    return waiting


def figures_of(rows: Sequence[Mapping[str, float]], skip: int, samples: int) -> dict[str, float]:
    """Return samples per second of the iterations after the first `skip`, and how long they took.

    Args:
        samples: of an iteration.
    """
    counted = steady(rows, skip)
    steps = [row["time/iteration_s"] - row.get("time/evaluate_s", 0.0) for row in counted]
    means = {name: sum(row.get(key, 0.0) for row in counted) / len(counted) for name, key in FIGURES.items()}
    return {
        "samples_per_s": samples * len(counted) / sum(steps),
        "iteration_s_mean": sum(steps) / len(steps),
        "iteration_s_max": max(steps),
        **means,
    }
