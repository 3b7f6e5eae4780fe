"""How well a run uses its machine, and what goes wrong in it: figures of an iteration beyond those of its tasks.

Shares of the iteration, FLOPs against the GPU's peak, memory, GPU samples. Sources: what each command used on its ranks
(`Session.usage`, gathered by `Session.call`), when each task ran (penstock/session/clock.py), and samples of the hosts.
None of it is a task: the figures are sums of what is known already.

An alarm is said once, with what to change, and recorded as `alarm/<name>`, 0 or 1; the rules are in
penstock/reports/alarms.py.

Left out: scaling efficiency, which compares several numbers of GPUs and so takes several runs (`penstock bench
scaling`). What one run can say of it is `parallel_efficiency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from prefect import get_run_logger

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.commands.hosts import GpuSample, TakeGpuSamples
from penstock.engines.families.shape import read_shape
from penstock.engines.groups.group import OutOfMemory
from penstock.engines.groups.hosts import REPLY_S, HostFailed
from penstock.engines.groups.machine import gpu_name, visible_gpus
from penstock.engines.groups.spec import LOCAL
from penstock.engines.sizing.flops import bfloat16_flops, generation_flops, peak_flops
from penstock.engines.sizing.gpu_figures import gpu_figures
from penstock.reports.alarms import RULES, STEP_RULES, Rule, looked_at, raised
from penstock.session.clock import Lap, Span
from penstock.session.events import announce
from penstock.session.session import Session, Training
from penstock.state.events import losses
from penstock.state.run_folder import read_metrics

FRAGMENTED_BELOW = 0.8  # share of the reserved memory that is allocated
FRAGMENTED_GIB = 4.0  # of reserved memory that is not allocated: less is worth no warning


def role_figures(training: Training, role: Role, key: str, work: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return how fast a command worked for `role`, and the peak of the rank's memory.

    Args:
        key: the command's; without its usage (its result was there already) there are no figures.
        work: `tokens` and `flops` of all ranks; default: what the ranks reported.

    `<role>/mfu` and `<role>/tokens_per_s_per_gpu` exist on GPUs only, the first where the GPU's peak is known and the
    model is a dense decoder; `<role>/communication_share` with several ranks.
    """
    session = training.session()
    ranks = session.usage.get(key)
    if ranks is None:
        return {}
    seconds = slowest(ranks)
    figures = speed(role, ranks[0] if work is None else work, seconds, len(ranks), gpu_of(session, role))
    if "communication_s" in ranks[0]:
        busy = np.mean([rank["communication_s"] for rank in ranks])
        figures[f"{role}/communication_share"] = float(busy) / seconds
    return figures | memory(_of_iteration(session.usage, key.partition("/")[0]))


def slowest(ranks: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds that a command took on the rank that worked longest, by its usage."""
    return max(rank["seconds"] for rank in ranks)


def _of_iteration(usage: Mapping[str, list[dict[str, float]]], iteration: str) -> dict[str, list[dict[str, float]]]:
    # A copy of the items first: the thread of the other update may add its own meanwhile.
    return {key: ranks for key, ranks in list(usage.items()) if key.partition("/")[0] == iteration}


def generation_figures(training: Training, key: str, prompt_B: np.ndarray, response_B: np.ndarray) -> dict[str, float]:
    """Return `role_figures` of a generation; tokens are those of the responses."""
    session = training.session()
    if key not in session.usage:
        return {}
    shape, samples = read_shape(Path(session.model_folder)), session.config.rollout.samples
    work = {"tokens": float(response_B.sum())}
    if shape.explained:
        work["flops"] = generation_flops(shape, prompt_B, response_B, samples)
    return role_figures(training, "rollout", key, work)


def speed(
    role: Role, work: Mapping[str, float], seconds: float, ranks: int, gpu: tuple[str, str] | None
) -> dict[str, float]:
    """Return MFU and tokens per second and GPU of a command; `gpu`: name and dtype, None without a GPU."""
    if gpu is None:
        return {}
    figures = {f"{role}/tokens_per_s_per_gpu": work["tokens"] / seconds / ranks}
    peak = peak_flops(*gpu)
    if peak is not None and "flops" in work:
        flops = bfloat16_flops(work["flops"], work.get("fp8_flops", 0.0))
        figures[f"{role}/mfu"] = flops / (seconds * ranks * peak)
    return figures


def gpu_of(session: Session, role: Role) -> tuple[str, str] | None:
    """Return name and dtype of the GPUs that hold `role`; None for CPU ranks."""
    device = session.groups[role].spec.devices[0]
    if device.gpu is None:
        return None
    name = _name(device.gpu) if device.host == LOCAL else session.hosts[device.host].gpus[device.gpu].name
    return name, dtype_on_gpu(session.config)


@cache
def _name(visible: int) -> str:
    return gpu_name(visible_gpus()[visible])


def dtype_on_gpu(config: TrainConfig) -> str:
    """Return the dtype in which a GPU multiplies matrices."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def memory(usage: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the peaks of torch's allocator over ranks, by command and at most; nothing on CPU ranks.

    `memory/<command>_gib`: the most that was allocated during a command; `memory/gpu_gib`: the largest of these;
    `memory/reserved_gib`: what torch had reserved on the GPU at that peak; `memory/allocated_share`: the share of it
    that was allocated. (During other commands torch keeps what the fullest one needs.)
    """
    on_gpu = {key.partition("/")[2]: ranks for key, ranks in usage.items() if "allocated_gib" in ranks[0]}
    if not on_gpu:
        return {}
    figures = {f"memory/{name}_gib": max(rank["allocated_gib"] for rank in ranks) for name, ranks in on_gpu.items()}
    fullest = max((rank for ranks in on_gpu.values() for rank in ranks), key=lambda rank: rank["allocated_gib"])
    return {
        **figures,
        "memory/gpu_gib": max(figures.values()),
        "memory/reserved_gib": fullest["reserved_gib"],
        "memory/allocated_share": fullest["allocated_gib"] / fullest["reserved_gib"],
    }


def utilisation(training: Training, iteration: int) -> dict[str, float]:
    """Return the figures of the iteration that ends here, its seconds among them; the next one begins."""
    session, lap = training.session(), training.session().clock.lap()
    usage = _of_iteration(session.usage, str(iteration))
    figures = {"time/iteration_s": lap.seconds, **shares(lap, usage, iteration)}
    figures["oom/count"] = float(sum(event["event"] == OutOfMemory.__name__ for event in losses(training.run)))
    if "reference" in session.groups:
        figures |= role_figures(training, "reference", f"{iteration}/logprobs_reference")
    figures |= memory(usage) | parallel_efficiency(usage)
    figures |= gpu_figures(_gpu_samples(session, lap.seconds))
    _warn_of_fragments(training, figures)
    for key in session.usage.keys() - _of_iteration(session.usage, str(iteration + 1)).keys():
        del session.usage[key]  # but not that of a rollout that began ahead and has ended
    return figures


def throughput(config: TrainConfig, samples: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return how much an iteration got done per second of all of it, evaluation and waiting included.

    Args:
        samples: responses of its batch.
        metrics: of the iteration, its seconds among them; without an update in it there are no steps.
    """
    seconds = metrics["time/iteration_s"]
    figures = {"throughput/samples_per_s": samples / seconds}
    if "actor/skipped_steps" in metrics:
        steps = config.algorithm.mini_batches * config.algorithm.epochs - metrics["actor/skipped_steps"]
        figures["throughput/steps_per_s"] = steps / seconds
    return figures


def _gpu_samples(session: Session, last_s: float) -> dict[str, list[GpuSample]]:
    """Return what the hosts of GPU ranks saw; nothing of one that is lost, which the next command finds out."""
    if session.machines is None:
        return {}
    devices = [device for group in session.distinct_groups for device in group.spec.devices]
    names = sorted({device.host for device in devices if device.gpu is not None})
    asked = {name: session.machines.hosts.begin(name, TakeGpuSamples(last_s)) for name in names}
    found = {}
    for name, reply in asked.items():
        with suppress(HostFailed):
            found[name] = reply.result(REPLY_S)
    return found


def parallel_efficiency(usage: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return `ranks/parallel_efficiency`, 0 to 1: the share of the ranks' time in commands in which they worked.

    It is the POP model's (https://pop-coe.eu/node/69): load balance times communication efficiency, which is the work
    of all ranks over what they would have done without waiting for the slowest and without communicating. A command
    counts with the time of all its ranks. Collectives are measured in updates alone, and a reshard counts as one; those
    inside other commands count as work. There is no figure where each command has one rank.
    """
    apart = {key: ranks for key, ranks in usage.items() if key.partition("/")[2] != "reshard"}
    if all(len(ranks) == 1 for ranks in apart.values()):
        return {}
    worked = sum(rank["seconds"] - rank.get("communication_s", 0.0) for ranks in apart.values() for rank in ranks)
    return {"ranks/parallel_efficiency": worked / sum(len(ranks) * slowest(ranks) for ranks in usage.values())}


def shares(lap: Lap, usage: Mapping[str, list[dict[str, float]]], iteration: int) -> dict[str, float]:
    """Return `share/<task>` of the iteration, 0 to 1, and what is left: `share/other` and `time/other_s`.

    Tasks that run side by side count with the time in which their ranks worked, without waits for each other. On groups
    of their own they overlap, so all shares then add up to more than 1; a rollout that began before the iteration
    counts whole. Other is Prefect, the channel, files and records.
    """
    seconds: dict[str, float] = {}
    spent = 0.0
    for together in side_by_side(lap.spans):
        own: dict[str, float] = {}
        for span in together:
            own[span.task] = own.get(span.task, 0.0) + span.seconds
        if len(together) > 1:
            own |= {task: slowest(usage[key]) for task in own if (key := f"{iteration}/{task}") in usage}
        lasted = max(span.ended for span in together) - max(lap.began, min(span.began for span in together))
        spent += min(sum(own.values()), lasted)
        for task, worked in own.items():
            seconds[task] = seconds.get(task, 0.0) + worked
    other = max(0.0, lap.seconds - spent)
    return {f"share/{task}": value / lap.seconds for task, value in {**seconds, "other": other}.items()} | {
        "time/other_s": other
    }


def side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the tasks that ran at the same time together, in the order in which they began."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.began):
        if found and span.began < max(other.ended for other in found[-1]):
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _warn_of_fragments(training: Training, figures: Mapping[str, float]) -> None:
    share = figures.get("memory/allocated_share", 1.0)
    idle = figures.get("memory/reserved_gib", 0.0) * (1 - share)
    session = training.session()
    if session.warned_of_fragments or share >= FRAGMENTED_BELOW or idle < FRAGMENTED_GIB:
        return
    session.warned_of_fragments = True
    get_run_logger().warning(
        "of the GPU memory that torch reserved %.0f %% held nothing at the peak (%.1f GiB): it is fragmented. Choose a "
        "smaller or steadier micro_batch_tokens; in a group without rollout, PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True helps, too",
        100 * (1 - share),
        idle,
    )


def alarms(training: Training, metrics: dict[str, float]) -> dict[str, float]:
    """Return the alarms of an iteration with the figures `metrics`; one that was never raised in this run is logged."""
    figures = raised([*history(training), metrics])
    if training.config.rollout.ignore_eos:
        figures.pop("alarm/truncation", None)  # every response has the full length, as asked for
    _remember(training, metrics, figures, RULES)
    return figures


def step_alarms(training: Training, metrics: dict[str, float]) -> dict[str, float]:
    """Return the alarms of a step of an offline training; as `alarms` otherwise."""
    figures = raised([*history(training), metrics], STEP_RULES)
    _remember(training, metrics, figures, STEP_RULES)
    return figures


def heldout_alarms(training: Training, metrics: dict[str, float]) -> dict[str, float]:
    """Return the alarms of a held-out measurement of an offline training, against the one before its first step."""
    before = [item["metrics"] for item in read_metrics(training.run) if item["iteration"] == 0]
    figures = raised([*before, metrics], STEP_RULES)
    _say(training, figures, STEP_RULES)
    return figures


def _remember(training: Training, metrics: dict[str, float], figures: dict[str, float], rules: Sequence[Rule]) -> None:
    _say(training, figures, rules)
    training.session().history = looked_at([*training.session().history, metrics | figures])


def _say(training: Training, figures: dict[str, float], rules: Sequence[Rule]) -> None:
    for rule in rules:
        if figures.get(rule.metric) and rule.metric not in training.session().alarms_said:
            training.session().alarms_said.add(rule.metric)
            get_run_logger().warning("alarm: %s. %s", rule.happens, rule.change)
            announce(training, f"alarm.{rule.name}", {"happens": rule.happens, "change": rule.change})


def history(training: Training) -> list[Mapping[str, float]]:
    """Return the figures of the iterations before that are looked at, the oldest first."""
    session = training.session()
    if not session.history:  # the first iteration of this process; a resumed run has some behind it
        session.history = [dict(item["metrics"]) for item in read_metrics(training.run) if item["iteration"] > 0]
        session.alarms_said = {
            rule.metric for rule in (*RULES, *STEP_RULES) if any(item.get(rule.metric) for item in session.history)
        }
    return session.history
