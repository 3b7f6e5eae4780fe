"""The actor's update beside the same in plain PyTorch FSDP and in plain DeepSpeed: samples per second, and memory.

All three take as many optimizer steps on the same rows, one after the other on the same devices. The first gradient has
to have the same norm, to rounding: else they would not do the same work, and nothing is reported. Left out: what the
plain programs do (penstock/benchmarks/native/plain_rank.py).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks import update
from penstock.benchmarks.native.work import LIBRARIES, Work
from penstock.benchmarks.reporting.result import BenchResult, new_result, steady
from penstock.benchmarks.workload.experience import UNVERIFIED, Lengths, write_experience
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.schedule import value_at
from penstock.engines.families.shape import read_shape
from penstock.engines.groups import interface
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import place

SAME_GPU, SAME_CPU = 0.02, 1e-4  # how far norms of the first gradient may be apart, as a share: bfloat16 rounds
LOOK_S = 0.05
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
KEPT = ("loss", "grad_norm")
LINES = 10  # of the log of a program that failed


def measure(
    config: TrainConfig, lengths: Lengths, command: str, *, steps: int, skip: int, rows: int | None
) -> BenchResult:
    """Update `steps` times in each way; return the medians after the first `skip`.

    Args:
        rows: of a plain micro-batch; None: as many as the longest of them let into the recipe's micro-batch.

    Raises:
        UserError: the recipe's update is not the plain one, a program failed, or gradients are not the same.
    """
    steady(range(steps), skip)
    folder = _check_plain(config, len(lengths.responses_B))
    longest = int((lengths.prompts_B + lengths.responses_B).max())
    rows = rows or max(1, value_at(config.actor.budget, 1) // longest)
    ours = update.measure(config, lengths, command, steps=steps, skip=skip, critic=False)
    details = [{"library": "Penstock", "step": row["step"], **_kept(row, "actor/")} for row in ours.details]
    peers, gpu = {}, _gpus(config)[0] is not None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        experience = Path(scratch) / "experience.parquet"
        write_experience(experience, lengths, read_shape(folder).vocabulary, UNVERIFIED, config.rollout.samples)
        work = Work(
            library="",
            model=str(folder),
            experience=str(experience),
            results="",
            rows=rows,
            steps=steps,
            optimizer=config.actor.optimizer.model_dump(mode="json"),
            zero_stage=config.actor.zero_stage,
            recompute=bool(config.actor.gradient_checkpointing),
        )
        for library, name in LIBRARIES.items():
            ranks = _trained(config, replace(work, library=library, results=str(Path(scratch) / library)))
            peers[name] = _figures(ranks, lengths, skip, gpu)
            steps_of = enumerate(ranks[0]["steps"], start=1)
            details += [{"library": name, "step": number, **_kept(step)} for number, step in steps_of]
    _check_same(details, SAME_GPU if gpu else SAME_CPU)
    return new_result(
        "native",
        command,
        {**ours.figures, "samples_per_s": len(lengths.responses_B) / ours.figures["update_s"]},
        peers=peers,
        settings={**ours.settings, "plain_rows": rows, "plain_recompute": bool(config.actor.gradient_checkpointing)},
        details=details,
    )


def _kept(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    return {name: row[before + name] for name in KEPT}


def _figures(ranks: Sequence[Mapping[str, Any]], lengths: Lengths, skip: int, gpu: bool) -> dict[str, float]:
    """Return a library's figures; a step takes as long as its slowest rank."""
    seconds = [max(step["seconds"] for step in steps) for steps in zip(*(rank["steps"] for rank in ranks), strict=True)]
    taken = statistics.median(steady(seconds, skip))
    return {
        "update_s": taken,
        "samples_per_s": len(lengths.responses_B) / taken,
        "tokens_per_s_per_gpu": lengths.tokens / taken / len(ranks),
        ("peak_gib" if gpu else "rank_gib"): max(rank["memory"] for rank in ranks),
    }


def _check_same(details: Sequence[Mapping[str, Any]], within: float) -> None:
    """Refuse figures of gradients that are not the same.

    Args:
        within: how far the norms of the first may be apart, as a share of ours.

    Raises:
        UserError: names whose norm is another.
    """
    norms = {row["library"]: row["grad_norm"] for row in details if row["step"] == 1}
    ours = norms.pop("Penstock")
    for name, norm in norms.items():
        if abs(norm - ours) > within * ours:
            raise UserError(
                f"the first gradient's norm is {ours:g} here and {norm:g} in plain {name}: they do not do the same",
                "report it with the command: one of them is wrong",
            )


def _check_plain(config: TrainConfig, rows: int) -> Path:
    """Return the model's folder; refuse a recipe whose update is another than the plain programs'."""
    algorithm, optimizer = config.algorithm, config.actor.optimizer
    same = {
        "one optimizer step on its own tokens": algorithm.mini_batches == algorithm.epochs == 1,
        "ppo_clip without a second clip": algorithm.policy_loss == "ppo_clip"
        and not algorithm.settings.get("dual_clip"),
        "a mean over tokens": algorithm.aggregation == "token-mean",
        "no KL, entropy bonus or correction": not (
            algorithm.kl or algorithm.entropy_coefficient or algorithm.correction
        ),
        "AdamW": optimizer.name == "adamw",
        "every weight trained": config.actor.lora is None,
        "a learning rate that holds": (optimizer.warmup_steps, optimizer.decay) == (0, "constant")
        and not isinstance(optimizer.learning_rate, dict),
        "a temperature of 1": config.rollout.temperature == 1.0,
    }
    if lacking := [what for what, holds in same.items() if not holds]:
        raise UserError(f"the plain programs have {', '.join(lacking)}", "take configs/bench_grpo.yaml, or the like")
    if rows % (ranks := len(_gpus(config))):
        raise UserError(
            f"{rows} rows for {ranks} ranks", "the plain programs give each as many: change rollout.prompts"
        )
    if config.model.path is None:
        raise UserError("the plain programs need the folder of a model", "name one: model.path=models/random-0.5b")
    return Path(config.model.path)


def _gpus(config: TrainConfig) -> list[int | None]:
    """Return the devices of the actor's ranks; None: a rank on the CPU."""
    specs = place(config, len(visible_gpus()), Path())
    return [device.gpu for spec in specs if "actor" in spec.roles for device in spec.devices]


def _trained(config: TrainConfig, work: Work) -> list[dict[str, Any]]:
    """Run a library's program on the actor's devices; return what each rank has written.

    Raises:
        UserError: a rank failed.
    """
    results, gpus = Path(work.results), _gpus(config)
    results.mkdir()
    given = results / "work.json"
    given.write_text(json.dumps(asdict(work)), encoding="utf-8")
    cores = max(1, len(os.sched_getaffinity(0)) // len(gpus))
    devices = ON_CPU if gpus[0] is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    threads = {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"}  # as our ranks have it
    shared = {**os.environ, **interface.variables(), **devices, **threads, "HF_HUB_OFFLINE": "1"}
    with ExitStack() as ranks:
        programs = []
        for rank in range(len(gpus)):
            log = ranks.enter_context((results / f"{rank}.log").open("wb"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(gpus))}
            command = [sys.executable, "-m", "penstock.benchmarks.native.plain_rank", str(given)]
            programs.append(subprocess.Popen(command, env=shared | own, stdout=log, stderr=log))
            ranks.callback(programs[-1].wait)
            ranks.callback(programs[-1].kill)
        while any(program.poll() is None for program in programs) and not any(program.poll() for program in programs):
            time.sleep(LOOK_S)
        failed = [rank for rank, program in enumerate(programs) if program.poll()]
    if failed:
        tail = (results / f"{failed[0]}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
        said = "\n    ".join(tail)
        raise UserError(f"plain {LIBRARIES[work.library]} failed:\n    {said}", "lower --rows if memory was short")
    return [json.loads((results / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(len(gpus))]
