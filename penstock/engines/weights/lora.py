"""LoRA: a low-rank update beside each linear layer, trained while the model's own weights rest (arXiv 2106.09685).

y = W x + b + s B A x, with A [rank, in], B [out, rank] and s = alpha / rank; A starts random, B at zero, so that a
model with fresh adapters is the base model bit for bit. The weights keep their Hugging Face names and storage: what
reads them (reshard, export, checkpoints) finds them as in a model without adapters, and the adapters beside them.

The experts of a mixture get a pair each where that is asked for (`lora.experts`). The library stacks them in two
parameters a layer, of which each gets one stacked A and one B; tokens meet their experts' in the grouped products by
which they meet the experts.

PEFT's classes are not used: they rename the base weights, add scaled outputs in passes of their own where one matrix
product does both, make whole merged experts in every pass, and take the adapters' gradients away when they are
switched off. Suffixes: `_RI` rank x in, `_OR` out x rank, `_OI` out x in, `_E` experts; `_N` tokens, `_K` experts of
each, `_P` pairs of both, by expert. Left out: dropout (log-probs must be the same whenever they are computed), adapters
on embeddings, ZeRO-3 (penstock/configs/schema.py refuses it), adapters' files (penstock/engines/models/peft.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.base.errors import UserError
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.weights.checksum import word_sum
from penstock.engines.weights.experts import stacks_of_experts
from penstock.engines.weights.layout import blocks, family_in, flatten_in_place, plan

GOLDEN = 0x9E3779B1 - (1 << 32)  # the golden ratio's fraction of 2^32, as int32

ADAPTERS = ("lora_A", "lora_B")

FROZEN_SUM = "frozen_sum"  # in a checkpoint

NO_EXPERTS = (
    "lora.experts has no effect: the model has no experts",
    "remove it, or train a mixture of experts (docs/models.md)",
)

EXPERTS_ADAPTER = "_lora"  # after the name of the parameter beside which it is

MERGED_AT_ONCE = 1 << 26  # numbers of experts, in float32 and as often again


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
        return _rounded(torch.addmm(base_OI, b_OR, a_RI, alpha=self.scale), self.weight.dtype)


class LoraExperts(nn.Module):
    """Adapters beside a parameter that stacks the experts of a layer, a pair for each of them.

    Args:
        experts: the library's module of that parameter, a part of which this becomes.
        name: the parameter's.
        generator: as of a linear layer.
    """

    def __init__(self, experts: Any, name: str, config: LoraConfig, generator: torch.Generator) -> None:
        from transformers.integrations.moe import _grouped_linear  # private: only what needs it asks for it

        super().__init__()
        self._grouped_linear = _grouped_linear
        self._place = (experts, name)  # a tuple: neither is a part of this module
        self.transposed = bool(experts.is_transposed)  # rows and columns of each expert have changed places
        count, outputs, inputs = (self.weight.mT if self.transposed else self.weight).shape
        bound = 1 / math.sqrt(inputs)
        drawn_ERI = torch.empty(count, config.rank, inputs).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn_ERI.to(self.weight))
        self.lora_B = nn.Parameter(self.weight.new_zeros(count, outputs, config.rank))
        self.config, self.scale, self.adapted = config, config.scale, True

    @property
    def weight(self) -> torch.Tensor:
        """The experts."""
        experts, name = self._place
        weight: torch.Tensor = getattr(experts, name)
        return weight

    def forward(self, input_PI: torch.Tensor, ends_E: torch.Tensor, bias_PO: torch.Tensor | None) -> torch.Tensor:
        """Return what each pair's expert makes of its input, [P, out].

        Args:
            ends_E: where the pairs of each expert end.
        """
        grouped = partial(self._grouped_linear, offs=ends_E)  # by name: the library has had them in two orders
        output_PO = grouped(input_PI, self.weight, bias=bias_PO, is_transposed=self.transposed)
        low_PR = grouped(input_PI, self.lora_A, bias=None, is_transposed=False)
        added_PO = grouped(low_PR, self.lora_B, bias=None, is_transposed=False)
        return torch.add(output_PO, added_PO, alpha=self.scale)

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return W + s B A of every expert, rounded as a linear layer's; a few experts at a time are in float32."""
        merged, together = torch.empty_like(self.weight), max(1, MERGED_AT_ONCE // self.weight[0].numel())
        stacks = (merged, self.weight, self.lora_A, self.lora_B)
        for part, base, a_ERI, b_EOR in zip(*(stack.split(together) for stack in stacks), strict=True):
            factors = (a_ERI.mT, b_EOR.mT) if self.transposed else (b_EOR, a_ERI)
            exact = torch.baddbmm(base.float(), *(factor.float() for factor in factors), alpha=self.scale)
            part.copy_(_rounded(exact, merged.dtype))
        return merged


Adapted = LoraLinear | LoraExperts


def _take_adapted_experts(
    experts: Any,
    library: Callable[..., torch.Tensor],
    gate_up: LoraExperts,
    down: LoraExperts,
    hidden_NH: torch.Tensor,
    experts_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """Return what a layer's experts and their adapters make of tokens, [N, H], in the library's order of terms.

    As in its `grouped_mm_experts_forward` nothing waits for the device, and no expert is computed by itself.

    Args:
        experts: the library's module; library: what it computes without adapters.
        weights_NK: the router's.
    """
    if not gate_up.adapted:
        return library(hidden_NH, experts_NK, weights_NK)
    experts_P, order_P = experts_NK.flatten().sort()
    every_E = torch.arange(experts.num_experts, device=experts_P.device)
    ends_E = torch.searchsorted(experts_P, every_E, right=True, out_int32=True)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else ()
    up_PO, down_PO = (bias[experts_P] for bias in biases) if biases else (None, None)
    hidden_PH = hidden_NH[order_P // experts_NK.shape[1]]
    found_PH = down(experts._apply_gate(gate_up(hidden_PH, ends_E, up_PO)), ends_E, down_PO)
    found_PH = found_PH * weights_NK.flatten()[order_P].unsqueeze(1)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    return found_PH[place_P].unflatten(0, experts_NK.shape).sum(1).to(hidden_NH.dtype)


def _rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dithered(exact) if dtype is torch.bfloat16 else exact.to(dtype)


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
    """Freeze a model and give its linear layers, and experts, adapters, in place; a head of scores stays trained.

    Routers of a mixture rest, also where the library has them as linear layers.

    Raises:
        UserError: a target is no linear layer of the model's blocks, or there are no experts.
    """
    family = family_in(lm)
    resting = set(family.routers if family.experts else ())
    linears = {
        f"{block}.{name}": module
        for block, parent in blocks(lm).items()
        for name, module in parent.named_modules()
        if isinstance(module, nn.Linear) and resting.isdisjoint(name.split("."))
    }
    there = {name.rpartition(".")[2] for name in linears}
    if missing := [name for name in config.targets or () if name not in there] or not linears:
        raise UserError(
            f"lora.targets: the model's blocks have no linear layer {missing if linears else ''}",
            f"name some of {', '.join(sorted(there))}" if there else "train this model without 'lora'",
        )
    stacks = stacks_of_experts(lm) if config.experts else {}
    if config.experts and not stacks:
        raise UserError(*NO_EXPERTS)
    lm.requires_grad_(False)
    if isinstance(score := getattr(lm, "score", None), nn.Module):
        score.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in linears.items():
        if config.targets is None or name.rpartition(".")[2] in config.targets:
            lm.set_submodule(name, LoraLinear(linear, config, generator))
    for experts in stacks.values():
        _attach_to_experts(experts, config, generator)


def _attach_to_experts(experts: Any, config: LoraConfig, generator: torch.Generator) -> None:
    """Give the experts of a layer adapters; their module stays the library's, and computes with these from then on."""
    gate_up = LoraExperts(experts, "gate_up_proj", config, generator)
    down = LoraExperts(experts, "down_proj", config, generator)
    experts.add_module(f"gate_up_proj{EXPERTS_ADAPTER}", gate_up)
    experts.add_module(f"down_proj{EXPERTS_ADAPTER}", down)
    experts.forward = partial(_take_adapted_experts, experts, experts.forward, gate_up, down)


def adapted_layers(lm: nn.Module) -> dict[str, Adapted]:
    """Return what has adapters by the Hugging Face name of its weight; nothing in a model without adapters."""
    modules = dict(lm.named_modules())
    linears = {f"{name}.weight": module for name, module in modules.items() if isinstance(module, LoraLinear)}
    experts = {name: module for name, module in modules.items() if isinstance(module, LoraExperts)}
    return {**linears, **{name.removesuffix(EXPERTS_ADAPTER): module for name, module in experts.items()}}


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
