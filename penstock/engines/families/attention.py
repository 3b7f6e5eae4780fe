"""Which kernels of attention a device can have: for the checks before a start, which need no torch, and for ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.configs.sections.model import AttentionKernel
from penstock.engines.families.table import CAPS, family_of

FLASH_HEAD = 256  # the largest head that FlashAttention has kernels for
FLASH_MULTIPLE = 8  # of which the size of a head has to be one
FLEX_HEAD = 16  # the smallest head that FlexAttention computes on a GPU
INSTEAD_OF_4 = "use model.attention=flash_attention_2, or leave it out: auto takes the fastest that there is"

INSTEAD_OF_FLASH = "use model.attention=flex, or leave it out"
FLOAT32 = "computes in float32"


def needs_flex(settings: Mapping[str, Any]) -> str:
    """Return what a model does, by its configuration, that on a GPU FlexAttention alone computes; empty: nothing."""
    family = family_of(settings.get("model_type", ""))
    if any(settings.get(name) is not None for name in family.score_caps):
        return CAPS
    sizes = [settings.get(name) or 0 for name in ("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")]
    if sizes[0] and sizes[0] == sum(sizes[1:]):  # latent attention, with values of the keys' own size
        return ""
    return family.flex_alone


def no_flash_kernel(kernel: AttentionKernel, why: str) -> tuple[str, str]:
    """Return what is wrong with FlashAttention for a model that needs FlexAttention, which is `why`, and what to do."""
    return f"model.attention={kernel}: the model {why}, for which it has no kernel", INSTEAD_OF_FLASH


def of_other_device(kernel: AttentionKernel, gpu: bool) -> tuple[str, str]:
    """Return what is wrong with a kernel on a rank that has, or lacks, a GPU, and what to do."""
    if gpu:
        return (
            f"model.attention={kernel} is for ranks on a CPU, and these have GPUs",
            "use model.attention=flash_attention_2, or leave it out",
        )
    return f"model.attention={kernel} needs a GPU, and there is none", "use model.attention=sdpa, or leave it out"
