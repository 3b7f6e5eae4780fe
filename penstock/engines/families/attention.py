"""Which kernels of attention a device can have: for the checks before a start, which need no torch, and for ranks."""

from __future__ import annotations

from penstock.configs.sections.model import AttentionKernel

FLASH_HEAD = 256  # the largest head that FlashAttention has kernels for
FLASH_MULTIPLE = 8  # of which the size of a head has to be one
INSTEAD_OF_4 = "use model.attention=flash_attention_2, or leave it out: auto takes the fastest that there is"


def of_other_device(kernel: AttentionKernel, gpu: bool) -> tuple[str, str]:
    """Return what is wrong with a kernel on a rank that has, or lacks, a GPU, and what to do."""
    if gpu:
        return (
            f"model.attention={kernel} is for ranks on a CPU, and these have GPUs",
            "use model.attention=flash_attention_2, or leave it out",
        )
    return f"model.attention={kernel} needs a GPU, and there is none", "use model.attention=sdpa, or leave it out"
