"""In which order parameters lie in the trainer's flat buffer: as vLLM fuses them, so that it can read them there.

vLLM fuses some of Hugging Face's matrices (q, k, v; gate, up). If the parts lie next to each other in one buffer, the
fused matrix is a view of it. DeepSpeed flattens parameters in the optimizer's order, so that order is ours to choose.
What is fused, and what it is called on both sides, is the family's (penstock/engines/families/table.py).
Left out: which rows of a fused matrix an engine of several ranks holds (slices.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from penstock.engines.families.table import Family, family_of

T = TypeVar("T")


@dataclass(frozen=True)
class FusedParameter:
    """One parameter of vLLM and the Hugging Face parameters stacked in it, in row order."""

    name: str
    parts: tuple[str, ...]


def family_in(model: nn.Module) -> Family:
    """Return the family of a Hugging Face model, also of a wrapped one; the usual family without a configuration."""
    types = (getattr(getattr(module, "config", None), "model_type", None) for module in model.modules())
    return family_of(next((model_type for model_type in types if model_type), ""))


def plan(names: Iterable[str], family: Family) -> list[FusedParameter]:
    """Group Hugging Face parameter names as vLLM fuses them, in the order that makes each group adjacent."""
    known = list(names)
    result: list[FusedParameter] = []
    done: set[str] = set()
    for name in known:
        if name in done:
            continue
        fused = _fused_group(name, set(known), family)
        result.append(replace(fused, name=_served_name(fused.name, family)))
        done.update(fused.parts)
    return result


def _served_name(name: str, family: Family) -> str:
    for own, served in family.served_names:
        if name.startswith(own) or own.startswith(".") and own in name:
            return name.replace(own, served, 1)
    return name


def _fused_group(name: str, known: set[str], family: Family) -> FusedParameter:
    for own, served in family.experts:
        if name.endswith(f".{own}"):
            return FusedParameter(name.removesuffix(own) + served, (name,))
    *scope, module, leaf = name.split(".") if name.count(".") else ("", name, "")
    for linear in family.linears:
        if module in linear.parts:
            group = tuple(".".join([*scope, part, leaf]) for part in linear.parts)
            if known.issuperset(group):
                return FusedParameter(".".join([*scope, linear.served, leaf]), group)
    return FusedParameter(name, (name,))


def in_plan_order(named: Mapping[str, T], family: Family) -> dict[str, T]:
    """Return what belongs to Hugging Face parameters in the order of the flat buffer."""
    return {part: named[part] for fused in plan(named, family) for part in fused.parts}


def ordered_parameters(lm: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters in plan order: an optimizer that gets them so lays fused groups together."""
    trained = {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}
    return list(in_plan_order(trained, family_in(lm)).values())


def flatten_in_place(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Move parameters into one flat buffer, in order, for trainers that keep none of their own; return the buffer."""
    flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    offset = 0
    for parameter in parameters:
        view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        offset += parameter.numel()
    return flat


def flat_storage(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return parameters of these shapes in one zeroed buffer, in plan order: a copy of the trainer's flat buffer."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes)
    return {name: part.view(*shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def fused_view(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return one view over tensors stacked along rows, or None if they are not adjacent in one storage."""
    first, rows, offset = parts[0], 0, parts[0].storage_offset()
    for part in parts:
        together = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (
            together and part.is_contiguous() and part.storage_offset() == offset and part.shape[1:] == first.shape[1:]
        ):
            return None
        offset += part.numel()
        rows += part.shape[0]
    shape = (rows, *first.shape[1:])
    return first.detach().as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the transformer blocks of a Hugging Face model, also of a wrapped one, by their names.

    Of a model that sees those of its decoder: what is made for blocks (adapters, compiled code, kernels) an encoder of
    images does without.
    """
    kinds = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    encoder = family_in(model).encoder.rpartition(".")[2]
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}
    return {name: module for name, module in found.items() if not encoder or encoder not in name.split(".")}
