"""Checks of attention: the kernel that is named, and heads that it or vLLM computes, on this machine's devices."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.checks.model.shape import shape_of
from penstock.configs.schema import TrainConfig
from penstock.engines.families.attention import (
    FLASH_HEAD,
    FLASH_MULTIPLE,
    FLEX_HEAD,
    FLOAT32,
    INSTEAD_OF_4,
    needs_flex,
    no_flash_kernel,
    of_other_device,
)
from penstock.engines.families.served import cpu_head_sizes
from penstock.engines.families.shape import ModelShape, read_settings
from penstock.engines.groups.machine import gpu_name, is_hopper, visible_gpus
from penstock.engines.sizing.memory import weight_width


def check_attention(config: TrainConfig) -> None:
    """Check that there can be the kernel of attention that is named; of ranks elsewhere these say it when they start.

    Raises:
        UserError: it is not one for this machine's devices, or for heads of the actor's size.
    """
    kernel, gpus = config.model.attention, visible_gpus()
    if any(group.hosts for group in config.groups.values()):
        return
    why = flex_alone(config) if gpus else ""
    if kernel == "auto" and not why:
        return
    if (kernel == "sdpa") == bool(gpus):
        raise UserError(*of_other_device(kernel, gpu=bool(gpus)))
    shape = shape_of(config)
    if kernel in ("auto", "flex"):
        _check_heads_of_flex(why, shape)
        return
    if why:
        raise UserError(*no_flash_kernel(kernel, why))
    if kernel == "flash_attention_4" and (older := [gpu for gpu in gpus if not is_hopper(gpu)]):
        raise UserError(
            f"model.attention={kernel} is for Hopper GPUs, and GPU {older[0]} is a {gpu_name(older[0])}", INSTEAD_OF_4
        )
    size = shape.head_size
    if kernel != "sdpa" and (size > FLASH_HEAD or size % FLASH_MULTIPLE):
        raise UserError(
            f"model.attention={kernel}: the model has attention heads of {size} numbers; FlashAttention computes "
            f"multiples of {FLASH_MULTIPLE} up to {FLASH_HEAD}",
            "use another model",
        )


def _check_heads_of_flex(why: str, shape: ModelShape) -> None:
    """Check that heads are as large as FlexAttention computes them.

    Args:
        why: a model needs it; empty: it is named.

    Raises:
        UserError: those of keys or of values are smaller.
    """
    size = min(shape.head_size, shape.latent.value if shape.latent is not None else shape.head_size)
    if size >= FLEX_HEAD:
        return
    needed = f"the model {why}, which on a GPU needs FlexAttention" if why else "model.attention=flex"
    raise UserError(
        f"{needed}: that computes heads of at least {FLEX_HEAD} numbers, and the model's have {size}",
        "use another model" if why else "leave it out",
    )


def flex_alone(config: TrainConfig) -> str:
    """Return what a model does that on a GPU FlexAttention alone computes; empty: nothing, or vLLM alone computes it.

    A folder that is none is refused elsewhere.
    """
    if weight_width(config, "cuda") == 4 and set(config.roles) != {"rollout"}:
        return FLOAT32
    critic = None if config.critic is None else config.critic.path
    folders = [Path(path) for path in (config.model.path, critic, config.reward.model) if path is not None]
    settings = (read_settings(folder) for folder in folders if (folder / "config.json").is_file())
    return next(filter(None, map(needs_flex, settings)), "")


def check_head_size(config: TrainConfig) -> None:
    """Check that vLLM computes the actor's attention on a CPU; what GPUs compute is not looked at.

    Raises:
        UserError: there is no GPU, and vLLM's attention on the CPU does not know heads of this size.
    """
    if config.model.tiny is not None:
        remedy = "change model.tiny.hidden_size or model.tiny.heads: a head has hidden_size / heads numbers"
        refuse_head_size(shape_of(config), remedy)
    else:
        refuse_head_size(shape_of(config))


def refuse_head_size(shape: ModelShape, remedy: str = "use a model with other heads, or a GPU") -> None:
    """Check likewise a model of these sizes.

    Raises:
        UserError: as above.
    """
    size, known = shape.head_size, cpu_head_sizes()
    if visible_gpus() or not known or size in known:
        return
    sizes = ", ".join(map(str, sorted(known)))
    raise UserError(f"the model has attention heads of {size} numbers; on a CPU, vLLM computes {sizes}", remedy)
