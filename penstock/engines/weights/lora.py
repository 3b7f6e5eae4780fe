"""LoRA: a low-rank update beside each linear layer, trained while the model's own weights rest (arXiv 2106.09685).

y = W x + b + s B A x, with A [rank, in], B [out, rank] and s = alpha / rank; A starts random, B at zero, so that a
model with fresh adapters is the base model bit for bit. The weights keep their Hugging Face names and storage: what
reads them (reshard, export, checkpoints) finds them as in a model without adapters, and the adapters beside them.

The file format is PEFT's, its classes are not used: they rename the base weights, add scaled outputs in passes of
their own where one matrix product does both, and take the adapters' gradients away when they are switched off.

Suffixes: `_RI` rank x in, `_OR` out x rank, `_OI` out x in. Left out: dropout (log-probs must be the same whenever
they are computed), adapters on embeddings, ZeRO-3 (penstock/configs/schema.py refuses it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from penstock.base.errors import UserError
from penstock.base.files import share_weights_of
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.weights.checksum import word_sum
from penstock.engines.weights.layout import blocks, family_in, flatten_in_place, plan

GOLDEN = 0x9E3779B1 - (1 << 32)  # the golden ratio's fraction of 2^32, as int32

ADAPTERS = ("lora_A", "lora_B")

FROZEN_SUM = "frozen_sum"  # in a checkpoint

PEFT_PREFIX = "base_model.model."

ADAPTER_FOLDER = "adapter"  # beside merged weights: transformers would take an adapter among them for a part of them


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; weight and bias are those of the layer that it stands for.

    Args:
        base: the layer; its parameters are taken over, not copied.
        generator: draws A, on the CPU, so that it is the same on every rank and device.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        bound = 1 / math.sqrt(base.in_features)  # PyTorch's own for a linear layer, and PEFT's for A
        drawn_RI = torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn_RI.to(base.weight))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, config.rank))
        self.config, self.scale, self.adapted = config, config.scale, True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, with the adapter's added by the product that computes it."""
        output = super().forward(input)
        if not self.adapted:
            return output
        low = nn.functional.linear(input, self.lora_A).flatten(0, -2)
        return torch.addmm(output.flatten(0, -2), low, self.lora_B.t(), alpha=self.scale).view(output.shape)

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return W + s B A, computed in float32 and rounded once to the weights' dtype, with dither; [out, in]."""
        base_OI, a_RI, b_OR = self.weight.float(), self.lora_A.float(), self.lora_B.float()
        exact_OI = torch.addmm(base_OI, b_OR, a_RI, alpha=self.scale)
        return dithered(exact_OI) if self.weight.dtype is torch.bfloat16 else exact_OI.to(self.weight.dtype)


def dithered(exact: torch.Tensor) -> torch.Tensor:
    """Round float32 values to bfloat16, up or down as often as keeps their mean.

    Rounded to the nearest, an update below half a weight's last bit would be lost, since the base lies on the grid. All
    updates of the first steps are that small, so the rollout engine would go on with the base policy. What is added
    before the cut is a fixed sequence without repetition over the elements (multiples of the golden ratio), so that
    the result depends on nothing but the values, and a value on the grid stays as it is.
    """
    bits = exact.contiguous().view(torch.int32)
    noise = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).view(bits.shape)
    noise.mul_(GOLDEN).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    return noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def attach(lm: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze a model and give its linear layers adapters, in place; a head of scores stays trained.

    Raises:
        UserError: a target is no linear layer of the model's blocks.
    """
    linears = {
        f"{block}.{name}": module
        for block, parent in blocks(lm).items()
        for name, module in parent.named_modules()
        if isinstance(module, nn.Linear)
    }
    there = {name.rpartition(".")[2] for name in linears}
    if missing := [name for name in config.targets or () if name not in there] or not linears:
        raise UserError(
            f"lora.targets: the model's blocks have no linear layer {missing if linears else ''}",
            f"name some of {', '.join(sorted(there))}" if there else "train this model without 'lora'",
        )
    lm.requires_grad_(False)
    if isinstance(score := getattr(lm, "score", None), nn.Module):
        score.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in linears.items():
        if config.targets is None or name.rpartition(".")[2] in config.targets:
            lm.set_submodule(name, LoraLinear(linear, config, generator))


def adapted_layers(lm: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with adapters by the Hugging Face name of their weight; none in a model without adapters."""
    return {f"{name}.weight": module for name, module in lm.named_modules() if isinstance(module, LoraLinear)}


def base_parameters(lm: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their Hugging Face names: all but the adapters."""
    return {name: value for name, value in lm.named_parameters() if name.rpartition(".")[2] not in ADAPTERS}


def resting_parameters(lm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without an adapter: the merged model has the same, so they can be shared with it."""
    adapted = adapted_layers(lm)
    return {name: value for name, value in base_parameters(lm).items() if name not in adapted}


def lay_fused_together(lm: nn.Module) -> None:
    """Move frozen parts of each matrix that vLLM fuses next to each other, so that it can read them where they are.

    Trained parameters get their place from DeepSpeed. One group at a time exists twice.
    """
    resting = resting_parameters(lm)
    for fused in plan(resting, family_in(lm)):
        if len(fused.parts) > 1 and not any(resting[part].requires_grad for part in fused.parts):
            flatten_in_place([resting[part] for part in fused.parts])


def frozen_sum(module: nn.Module) -> int:
    """Return the sum of the bits of all frozen weights (checksum.py); 0 where everything is trained.

    A checkpoint of adapters is of use with these weights only, and does not hold them.
    """
    sums = [word_sum(value.data) for value in module.parameters() if not value.requires_grad]
    return int(torch.stack(sums).sum()) if sums else 0


def check_frozen(recorded: int, module: nn.Module) -> None:
    """Compare the frozen weights with the sum that a checkpoint has of them.

    Raises:
        UserError: they differ, so the trained adapters do not belong to them.
    """
    if recorded != frozen_sum(module):
        raise UserError(
            "the checkpoint's adapters were trained beside other weights than the model's folder holds now",
            "put back the folder that the run started from",
        )


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Within this block the model computes what its base computes."""
    layers = adapted_layers(lm).values()
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def merged_state(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of the merged model by its Hugging Face names: adapted weights as copies in host memory."""
    state = {name: value for name, value in lm.state_dict().items() if name.rpartition(".")[2] not in ADAPTERS}
    return state | {name: layer.merged().cpu() for name, layer in adapted_layers(lm).items()}


def adapter_state(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters alone, by their names in the model."""
    return {name: value for name, value in lm.state_dict().items() if name.rpartition(".")[2] in ADAPTERS}


def load_adapter(lm: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a model with adapters the values of `adapter_state`.

    Raises:
        ValueError: the adapters are of other layers or sizes.
    """
    own = adapter_state(lm)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in state.items()}:
        raise ValueError("the adapters are of other layers or sizes")
    for name, value in own.items():
        value.copy_(state[name])


def write_adapter(lm: Any, folder: Path) -> None:
    """Write the adapters alone in PEFT's format: adapter_config.json and adapter_model.safetensors."""
    layers = adapted_layers(lm)
    config = next(iter(layers.values())).config
    folder.mkdir(parents=True)
    tensors = {f"{PEFT_PREFIX}{name}.weight": value.cpu().contiguous() for name, value in adapter_state(lm).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(lm.name_or_path).name or None,  # the path itself is nobody else's business
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in layers}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    share_weights_of(folder, "adapter_config.json")
