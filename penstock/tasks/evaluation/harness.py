"""Tasks of lm-evaluation-harness on a model: the harness's own command and its vLLM, in a process of its own.

The package is an extra, and what it needs for a task comes from its cache: nothing is downloaded. A task's YAML may
name code, so folders with tasks of one's own lie where a reward function would, in the working folder.

Left out: few-shot settings, generation settings and limits, which belong to a task's YAML.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.base.errors import UserError
from penstock.base.files import no_folder
from penstock.engines.families.shape import read_settings, read_shape
from penstock.engines.groups import interface
from penstock.engines.groups.environment import AS_NVML_COUNTS
from penstock.engines.groups.machine import visible_gpus
from penstock.session.machines.claims import Wanted, claimed
from penstock.usercode.kept import command_of, number_from

LOOK_UP = "penstock.tasks.evaluation.harness_tasks"
HARNESS = "penstock.cli.serving.vllm_harness"
MOST_TOKENS = 8192  # of prompt and response; what is longer the harness cuts from the left
INSTALL = "pip install 'lm-eval>=0.4.13', or the extra 'tasks' of penstock"
LAST_LINES = 5
LOOK_UP_S = 900.0  # its index of tasks and the data of those that are named
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
ON_CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def check_tasks(tasks: Sequence[str], include_path: Path | None) -> None:
    """Check that the harness is installed, knows the tasks, and has their data.

    Raises:
        UserError: it is not, or does not.
    """
    if not tasks:
        if include_path is not None:
            raise UserError("--include-path has no effect without --tasks", "name tasks, or remove it")
        return
    if find_spec("lm_eval") is None:
        raise UserError(f"'{tasks[0]}' is a task of lm-evaluation-harness, which is not installed", INSTALL)
    if include_path is not None:
        _check_folder(include_path)
    found = _looked_up(tasks, include_path)
    if unknown := found["unknown"]:
        raise UserError(
            f"lm-evaluation-harness has no task '{unknown[0]}'",
            "'lm-eval ls tasks' lists them; tasks of your own lie in the folder of --include-path",
        )
    for name, reason in found["failed"].items():
        first = " ".join(reason.split())[:300]
        raise UserError(
            f"the task '{name}' cannot be loaded: {first}",
            "nothing is downloaded here: bring its data into the cache of the package 'datasets' (HF_HOME)",
        )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--include-path: {no_folder(folder)}", "name one with YAML files of tasks")
    if not folder.resolve().is_relative_to(Path.cwd()):
        raise UserError(
            f"--include-path: {folder} is outside of the working folder, and tasks may run code",
            f"start the command, or the worker, in a folder above it, or copy it below {Path.cwd()}",
        )


def _looked_up(tasks: Sequence[str], include_path: Path | None) -> dict[str, Any]:
    asked = json.dumps({"tasks": list(tasks), "include_path": None if include_path is None else str(include_path)})
    command = [sys.executable, "-P", "-m", LOOK_UP, asked]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, check=False, timeout=LOOK_UP_S
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"lm-evaluation-harness has not loaded {', '.join(tasks)} within {LOOK_UP_S:g} s", "name fewer at a time"
        ) from error
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise UserError(f"lm-evaluation-harness does not start: {last}", INSTALL)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """Return the environment of a process that finds the same modules as this one, ours among them."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return dict(os.environ) | OFFLINE | {"PYTHONPATH": path}


@task(task_run_name="tasks", cache_policy=NO_CACHE)
def run_tasks(
    model: str, tasks: list[str], include_path: str | None, folder: str, tensor_parallel: int, chat: bool
) -> dict[str, float]:
    """Run tasks on a model, once there are GPUs for it, and write what came of each document; return the figures.

    Args:
        model: Hugging Face folder.
        folder: where the harness puts its results, and its log.
        tensor_parallel: GPUs of its engine.
        chat: whether the model's chat template is put around what is asked.

    Raises:
        UserError: there are not as many GPUs.
        RuntimeError: the harness ended without results; says where its log is.
    """
    visible = visible_gpus()
    gpus = tensor_parallel if visible else 0
    if gpus > len(visible):
        raise UserError(
            f"rollout.tensor_parallel={gpus}, and {len(visible)} GPUs are visible", "lower it, or show more"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", HARNESS, "run", "--model", "vllm", "--tasks", ",".join(tasks)]
    command += ["--model_args", *_model_arguments(Path(model), gpus), "--batch_size", "auto"]
    command += ["--output_path", str(target), "--log_samples"]
    command += ["--include_path", include_path] if include_path is not None else []
    command += ["--apply_chat_template"] if chat else []
    environment = _environment() | interface.variables() | ({} if gpus else ON_CPU)
    with claimed(Wanted(more=gpus), f"{target.parent.name} {target.name}", get_run_logger().info) as claims:
        if claims.mine is not None:
            shown = ",".join(str(visible[gpu]) for gpu in claims.mine)
            environment |= AS_NVML_COUNTS | {"CUDA_VISIBLE_DEVICES": shown}
        _run(command, environment, target / "harness.log", claims.descriptors)
    return {name: value for name, value, _ in figures_in(target)}


def _model_arguments(folder: Path, gpus: int) -> list[str]:
    """Return what the harness starts vLLM with; weights keep their dtype on a GPU, as in `penstock serve`."""
    config = read_settings(folder)
    dtype = config.get("dtype") or config.get("torch_dtype") or "auto"
    values = {
        "pretrained": folder,
        "max_model_len": min(read_shape(folder).positions, MOST_TOKENS),
        **(
            {"dtype": dtype, "tensor_parallel_size": gpus, "gpu_memory_utilization": 0.8}
            if gpus
            else {"dtype": "float32", "enforce_eager": True}
        ),
    }
    return [f"{name}={value}" for name, value in values.items()]


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, kept: Sequence[int]) -> None:
    """Run the harness below a keeper, so that nothing of it outlives this process or this call.

    Args:
        kept: descriptors that it keeps open.

    Raises:
        RuntimeError: it failed.
    """
    number, told = os.pipe()
    with log.open("wb") as stream:
        keeper = subprocess.Popen(
            command_of(command, [told]), pass_fds=[told, *kept], env=dict(environment), stdout=stream, stderr=stream
        )
    os.close(told)
    try:
        number_from(number)
        code = keeper.wait()
    finally:
        keeper.terminate()
        keeper.wait()
    if code:
        last = " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:])
        raise RuntimeError(f"lm-evaluation-harness ended with code {code}: {last}; its log: {log}")


def figures_in(folder: Path) -> Iterator[tuple[str, float, float | None]]:
    """Yield name, value and standard error of each figure in the newest results below a folder.

    A name is `task/metric`; the result of another filter than the harness's usual one has its name behind.
    """
    newest = max(folder.rglob("results_*.json"))
    for name, results in json.loads(newest.read_text(encoding="utf-8"))["results"].items():
        for key, value in results.items():
            metric, comma, rest = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = results.get(f"{metric}_stderr,{rest}")
                yield named(name, metric, rest), float(value), error if isinstance(error, float) else None


def values_in(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield figure, document and value of each document of each task below a folder."""
    for path in sorted(folder.rglob("samples_*.jsonl")):
        task_name = path.stem.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_bytes().splitlines():  # of text it would split at characters within a JSON string
            sample = json.loads(line)
            for metric in sample["metrics"]:
                if isinstance(value := sample.get(metric), int | float):
                    yield (
                        named(task_name, metric, sample["filter"]),
                        f"{task_name}-{sample['doc_id']:06d}",
                        float(value),
                    )


def named(task_name: str, metric: str, filtered: str) -> str:
    """Return the name of a figure."""
    return f"{task_name}/{metric}" + ("" if filtered == "none" else f" ({filtered})")
