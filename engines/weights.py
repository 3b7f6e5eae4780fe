"""Reshard: the trainer's weights become the rollout engine's, by sharing storage where possible, by copying elsewhere.

vLLM fuses some of Hugging Face's matrices (q, k, v; gate, up). If the optimizer keeps the parts next to each other in
one flat buffer, the fused matrix is a view of that buffer: then vLLM's parameters alias the trainer's, an optimizer
step is visible at once, and a reshard moves no bytes. `plan` gives the order in which parameters must be laid out,
`bind` makes the aliases before vLLM captures CUDA graphs, `verify` proves them by address before each rollout.

What cannot be shared (a vocabulary that vLLM pads, other dtypes, ZeRO-3's shards) is copied by vLLM's own
`load_weights` and compared value by value afterwards. Left out: other GPUs' engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class FusedParameter:
    """One parameter of vLLM and the Hugging Face parameters stacked in it, in row order."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Sharing:
    """Which of vLLM's parameters alias the trainer's storage, and which are copied at every reshard."""

    shared: tuple[FusedParameter, ...]
    copied: tuple[FusedParameter, ...]
    unmapped: tuple[str, ...] = field(default=())  # vLLM's parameters with no known counterpart: loaded, not compared

    @property
    def copied_count(self) -> int:
        """Number of vLLM's parameters that a reshard copies."""
        return len(self.copied) + len(self.unmapped)


def plan(names: Iterable[str]) -> list[FusedParameter]:
    """Group Hugging Face parameter names as vLLM fuses them, in the order that makes each group adjacent."""
    known = list(names)
    result: list[FusedParameter] = []
    done: set[str] = set()
    for name in known:
        if name in done:
            continue
        fused = _fused_group(name, set(known))
        result.append(fused)
        done.update(fused.parts)
    return result


def _fused_group(name: str, known: set[str]) -> FusedParameter:
    *scope, module, leaf = name.split(".") if name.count(".") else ("", name, "")
    for fused, parts in FUSED.items():
        if module == parts[0]:
            group = tuple(".".join([*scope, part, leaf]) for part in parts)
            if known.issuperset(group):
                return FusedParameter(".".join([*scope, fused, leaf]), group)
    return FusedParameter(name, (name,))


def ordered_parameters(lm: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in plan order: hand them to the optimizer like this and fused groups lie together."""
    parameters = dict(lm.named_parameters())
    return [parameters[part] for fused in plan(parameters) for part in fused.parts]


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


def bind(vllm_model: nn.Module, lm: nn.Module, share: bool) -> Sharing:
    """Point vLLM's parameters at the trainer's storage; what does not fit gets storage of its own.

    Args:
        vllm_model: just initialised, its parameters still without storage (`without_storage`).
        lm: the trainer's model, its parameters at their final addresses.
        share: False copies everything.
    """
    ours, theirs = dict(lm.named_parameters()), dict(vllm_model.named_parameters())
    shared, copied = [], []
    for fused in plan(ours):
        if fused.name not in theirs:
            continue
        target = theirs[fused.name]
        view = fused_view([ours[part] for part in fused.parts]) if share else None
        if view is None or (view.shape, view.dtype, view.device) != (target.shape, target.dtype, target.device):
            copied.append(fused)
            continue
        target.data = view
        shared.append(fused)
    mapped = {fused.name for fused in (*shared, *copied)}
    bound = {fused.name for fused in shared}
    for name, target in theirs.items():
        if name not in bound:
            target.data = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    return Sharing(tuple(shared), tuple(copied), tuple(name for name in theirs if name not in mapped))


@contextmanager
def without_storage() -> Iterator[None]:
    """Within this context new parameters take no memory: one element, expanded to the parameter's shape.

    Shape, dtype and the attributes that vLLM sets survive; `bind` gives the storage.
    """
    register = nn.Module.register_parameter

    def stub(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > 1:
            parameter.data = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        register(module, name, parameter)

    nn.Module.register_parameter = stub  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def register_loader(name: str, lm: nn.Module, share: bool) -> list[Sharing]:
    """Register a vLLM model loader that binds to `lm`; the returned list receives the `Sharing` when it has run."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    result: list[Sharing] = []

    @register_model_loader(name)
    class BindingLoader(BaseModelLoader):
        """Builds vLLM's module without weights of its own."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to download: the weights are in this process."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Nothing to load: `bind` and `copy` do it."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            """Initialise, bind, copy the rest, and finish as vLLM expects."""
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(model_config.dtype):
                with device, without_storage():
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                result.append(bind(model, lm, share))
                copy(model, lm, result[-1])
                process_weights_after_loading(model, model_config, device)
            return model.eval()

    return result


@torch.no_grad()
def copy(vllm_model: Any, lm: nn.Module, sharing: Sharing) -> int:
    """Copy the parameters that are not shared; return the bytes moved.

    ZeRO-3's shards are gathered one fused group at a time, so no more than one group is whole at once.
    """
    ours, moved = dict(lm.named_parameters()), 0
    loaded: set[str] = set()
    groups = [fused.parts for fused in sharing.copied]
    if sharing.unmapped:
        groups += [(name,) for name in ours if name not in _parts(sharing)]
    for parts in groups:
        with _gathered([ours[part] for part in parts]):
            loaded |= vllm_model.load_weights((part, ours[part].data) for part in parts) or set()
            moved += sum(ours[part].numel() * ours[part].element_size() for part in parts)
    if missing := set(sharing.unmapped) - loaded:
        raise RuntimeError(f"vLLM loaded no weights into {', '.join(sorted(missing))}")
    return moved


def _parts(sharing: Sharing) -> set[str]:
    return {part for fused in (*sharing.shared, *sharing.copied) for part in fused.parts}


def _gathered(parameters: list[nn.Parameter]) -> Any:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


@torch.no_grad()
def verify(vllm_model: nn.Module, lm: nn.Module, sharing: Sharing) -> list[str]:
    """Return vLLM's parameters that are not the trainer's: another address if shared, another value if copied."""
    ours, theirs = dict(lm.named_parameters()), dict(vllm_model.named_parameters())
    wrong = [
        fused.name
        for fused in sharing.shared
        if not _stacked_at(theirs[fused.name].data_ptr(), [ours[part] for part in fused.parts])
    ]
    for fused in sharing.copied:
        with _gathered([ours[part] for part in fused.parts]):
            row = 0
            for part in fused.parts:
                rows = ours[part].shape[0]
                if not torch.equal(theirs[fused.name][row : row + rows], ours[part]):
                    wrong.append(fused.name)
                    break
                row += rows
    return wrong


def _stacked_at(address: int, parts: list[nn.Parameter]) -> bool:
    """Whether the parts lie one after the other from `address` on: any one of them may have moved alone."""
    for part in parts:
        if part.data_ptr() != address:
            return False
        address += part.numel() * part.element_size()
    return True
