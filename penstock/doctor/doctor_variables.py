"""Environment variables that slow trainings down or break them, and why; pure, part of `penstock doctor`.

They are often left over from a search for an error, or copied from another framework's recipe. Only variables whose
effect does not depend on the machine are judged here. Left out: variables that Penstock sets for its ranks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.doctor.diagnosis import Diagnosis, Level


@dataclass(frozen=True)
class Variable:
    """A variable that matters from `gpus` GPUs on, when `matters` holds for its value."""

    name: str
    gpus: int
    matters: Callable[[str], bool]
    level: Level
    why: str


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y")


def _set(value: str) -> bool:
    return bool(value.strip())


def _has(*words: str) -> Callable[[str], bool]:
    return lambda value: any(word in value.replace(" ", "").lower() for word in words)


VARIABLES = (
    Variable(
        "NCCL_P2P_DISABLE",
        2,
        _on,
        "warning",
        "GPUs exchange data through host memory, not over NVLink or PCIe directly",
    ),
    Variable(
        "NCCL_P2P_LEVEL",
        2,
        lambda value: value.strip().upper() in ("LOC", "0"),
        "warning",
        "GPUs exchange data through host memory, not over NVLink or PCIe directly",
    ),
    Variable("NCCL_SHM_DISABLE", 2, _on, "warning", "GPUs without a direct path exchange data through network sockets"),
    Variable("NCCL_IB_DISABLE", 2, _on, "ok", "no effect here: all ranks are on one machine, without InfiniBand"),
    Variable("NCCL_ALGO", 2, _set, "warning", "takes from NCCL the choice of the fastest way for each size"),
    Variable("NCCL_PROTO", 2, _set, "warning", "takes from NCCL the choice of the fastest protocol for each size"),
    *(
        Variable(name, 2, _set, "warning", "takes from NCCL the choice of how many GPU resources a collective gets")
        for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE")
    ),
    Variable(
        "NCCL_NVLS_ENABLE",
        2,
        lambda value: value.strip() == "0",
        "ok",
        "NVSwitches sum nothing up themselves, as some machines need it; all-reduce may be slower than it could be",
    ),
    Variable(
        "NCCL_DEBUG",
        1,
        _has("info", "trace"),
        "warning",
        "every rank writes a line per communicator or call to its log",
    ),
    Variable("NCCL_BLOCKING_WAIT", 1, _on, "warning", "the CPU waits for every collective and cannot prepare the next"),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT", 1, _on, "warning", "the CPU waits for every collective and cannot prepare the next"
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", 1, _has("detail"), "warning", "every collective is preceded by one that checks it"
    ),
    Variable("CUDA_LAUNCH_BLOCKING", 1, _on, "warning", "every kernel is waited for: training is several times slower"),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        1,
        lambda value: value.strip() == "1",
        "warning",
        "copies and collectives queue behind computation, not beside it; Megatron asks for it, nothing here does",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        1,
        _set,  # PyTorch looks only at whether it is there
        "problem",
        "every tensor is a call of the driver, and CUDA graphs cannot be captured",
    ),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        1,
        _has("backend:cudamallocasync"),
        "problem",
        "this allocator has no memory pools, and vLLM's engine cannot give its KV cache back without one",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        1,
        _has("backend:cudamallocasync"),
        "problem",
        "this allocator has no memory pools, and vLLM's engine cannot give its KV cache back without one",
    ),
)


def variables(found: dict[str, str], gpus: int, cores: int, files: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Judge the environment of a machine with so many visible GPUs and usable cores.

    Args:
        files: of the variables that are not in the environment, the file of NCCL that sets them.
    """
    told = [*_listed(found, gpus, files), *_segments(found, gpus), *_threads(found, gpus, cores)]
    yield from told or [Diagnosis("environment", "ok", "no variable that slows or breaks a training")]


def _listed(found: dict[str, str], gpus: int, files: Mapping[str, str]) -> Iterator[Diagnosis]:
    for variable in VARIABLES:
        value, file = found.get(variable.name), files.get(variable.name)
        if value is not None and gpus >= variable.gpus and variable.matters(value):
            how = f"remove {variable.name} from {file}" if file else f"unset {variable.name}"
            remedy = "" if variable.level == "ok" else how
            yield Diagnosis("environment", variable.level, f"{variable.name}={value}: {variable.why}", remedy)


def _segments(found: dict[str, str], gpus: int) -> Iterator[Diagnosis]:
    """Expandable segments help training; vLLM switches them off for its pool where it sees that they are on."""
    name, seen = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    if gpus and seen not in found and _has("expandable_segments:true")(found.get(name, "")):
        text = f"{name}={found[name]}: vLLM, which cannot have them in the pool of its KV cache, may not see it"
        yield Diagnosis("environment", "warning", text, f"give the same value as {seen}")


def _threads(found: dict[str, str], gpus: int, cores: int) -> Iterator[Diagnosis]:
    value = found.get("OMP_NUM_THREADS")
    if value is None:
        return
    text = f"OMP_NUM_THREADS={value}"
    remedy = "unset OMP_NUM_THREADS: each rank then takes its share of the cores"
    if not value.strip().isdigit() or int(value) == 0:
        yield Diagnosis("environment", "warning", f"{text} is not a number of threads", remedy)
    elif int(value) * max(1, gpus) > cores:
        yield Diagnosis(
            "environment", "warning", f"{text} for each rank: more threads than the {cores} cores, they wait", remedy
        )
    elif not gpus and int(value) == 1 < cores:
        yield Diagnosis("environment", "warning", f"{text}: a rank on the CPU uses one of {cores} cores", remedy)
