"""Builds vLLM's module without reading weights: its parameters become views of the trainer's storage, or get their own.

That happens before vLLM captures CUDA graphs, which keep addresses. Values are not looked at: every strategy brings
them with the first reshard, and proves them. So that it can prove all of them, a model is refused here if a parameter
on either side has no counterpart, or if vLLM computes with something else that it made of its parameters.

Left out: which parts belong together (slices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.engines.families.served import unserved
from penstock.engines.families.table import Family, family_of
from penstock.engines.weights.layout import fused_view
from penstock.engines.weights.mixers import compute_from_weights
from penstock.engines.weights.slices import Counterpart, Shapes, counterparts

DRAWN: tuple[Any, ...] = (nn.Embedding, nn.Linear)  # PyTorch's layers that fill their parameters when they are made


@dataclass(frozen=True)
class Binding:
    """What vLLM's parameters on this rank are made of."""

    shared: tuple[Counterpart, ...]  # views of the storage given: current without a copy
    copied: tuple[Counterpart, ...]  # with storage of their own, which a reshard writes and compares
    fp8: tuple[str, ...] = ()  # layers with a copy of eight bits beside theirs, which it makes anew and compares

    @property
    def writes(self) -> bool:
        """Whether a reshard writes into vLLM's own storage."""
        return bool(self.copied or self.fp8)


def bind(
    vllm_model: nn.Module, shapes: Shapes, storage: Mapping[str, torch.Tensor], dtype: torch.dtype, family: Family
) -> Binding:
    """Point vLLM's parameters at storage that holds their slices side by side; the others get storage of their own.

    Args:
        vllm_model: just initialised, its parameters still without storage (`without_storage`).
        shapes: whole shapes of all Hugging Face parameters.
        storage: the parameters whose storage may be shared, at their final addresses.
        dtype: of the Hugging Face parameters.
        family: says what they are called in vLLM.

    Raises:
        UserError: a parameter on either side has no counterpart of its dtype on the other.
    """
    theirs, known = dict(vllm_model.named_parameters()), counterparts(vllm_model, shapes, family)
    _check_complete(vllm_model, known, shapes, dtype, family)
    shared, copied = [], []
    for counterpart in known:
        target = theirs[counterpart.name]
        view = _shared_view(counterpart, storage)
        if view is None or (view.shape, view.dtype, view.device) != (target.shape, target.dtype, target.device):
            copied.append(counterpart)
            continue
        target.data = view
        shared.append(counterpart)
    bound = {item.name for item in shared}
    for name, target in theirs.items():
        if name not in bound:  # zeros, since vLLM computes with them before the first reshard; padding stays zero
            target.data = torch.zeros(target.shape, dtype=target.dtype, device=target.device)
    return Binding(shared=tuple(shared), copied=tuple(copied))


def _check_complete(
    vllm_model: nn.Module, known: Sequence[Counterpart], shapes: Shapes, dtype: torch.dtype, family: Family
) -> None:
    """Raise if a reshard could not write and compare everything: vLLM's parameters, and the model's.

    vLLM has routers that correct their choices, or parts of them, in float32, which holds what is narrower exactly.
    """
    dtypes = {dtype, torch.float32} if family.corrected else {dtype}
    mapped, taken = {item.name for item in known}, {piece.part for item in known for piece in item.slices}
    parameters = list(vllm_model.named_parameters())
    without = {
        "vLLM's": [name for name, parameter in parameters if name not in mapped or parameter.dtype not in dtypes],
        "the model's": [name for name in shapes if name not in taken],
    }
    if sides := [f"{len(names)} of {whose} ({', '.join(names[:3])})" for whose, names in without.items() if names]:
        raise unserved(type(vllm_model).__name__, f"has parameters without a known counterpart: {', '.join(sides)}")


def held(model: nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return address and shape of every tensor of more than one element that a module or one inside it holds."""
    found = {}
    for prefix, module in model.named_modules():
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found[f"{prefix}.{name}"] = (value.data_ptr(), tuple(value.shape))
    return found


def _shared_view(counterpart: Counterpart, storage: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if any(piece.part not in storage for piece in counterpart.slices):
        return None
    return fused_view([piece.of(storage[piece.part]) for piece in counterpart.slices])


@contextmanager
def without_storage() -> Iterator[None]:
    """Within this context new parameters take no memory: one element, expanded to the parameter's shape.

    Shape, dtype and the attributes that vLLM sets survive; `bind` gives the storage. PyTorch's own layers, of which
    vLLM makes routers and encoders of images, are not drawn at random.
    """
    register, draws = nn.Module.register_parameter, [(kind, kind.reset_parameters) for kind in DRAWN]

    def stub(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > 1:
            parameter.data = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        register(module, name, parameter)

    nn.Module.register_parameter = stub  # type: ignore[assignment]
    for kind in DRAWN:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for kind, draw in draws:
            kind.reset_parameters = draw


def register_loader(
    name: str,
    shapes: Shapes,
    storage: Mapping[str, torch.Tensor],
    serve_in_fp8: Callable[[nn.Module, Family], tuple[str, ...]] | None = None,
) -> list[Binding]:
    """Register a vLLM model loader that binds to `storage`; the returned list receives the binding when it has run.

    Args:
        serve_in_fp8: lets layers compute with copies of eight bits, and names them.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    result: list[Binding] = []

    @register_model_loader(name)
    class BindingLoader(BaseModelLoader):
        """Builds vLLM's module without weights of its own."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to download: the weights are in the trainer."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Nothing to load: the first reshard brings the weights."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            """Initialise, bind, and finish as vLLM expects."""
            device = torch.device(vllm_config.device_config.device)
            family = family_of(model_config.hf_config.model_type)
            # The head is a parameter of its own unless it is tied.
            tie_embeddings_as_trained(model_config, tied=f"{family.language_head}.weight" not in shapes)
            with set_default_torch_dtype(model_config.dtype):
                with device, without_storage():
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                    give_head_its_bias(model, family, shapes)
                    if family.mixers:
                        compute_from_weights(model, model_config.dtype)
                bound = bind(model, shapes, storage, model_config.dtype, family)
                result.append(bound if serve_in_fp8 is None else replace(bound, fp8=serve_in_fp8(model, family)))
                before = held(model)
                process_weights_after_loading(model, model_config, device)
            if made := [name for name, place in held(model).items() if before.get(name) != place]:
                raise unserved(
                    type(model).__name__,
                    f"computes with {len(made)} tensors that vLLM makes of its parameters ({', '.join(made[:3])})",
                )
            return model.eval()

    return result


def give_head_its_bias(model: Any, family: Family, shapes: Shapes) -> None:
    """Give the head of a model that vLLM builds from the Transformers library's the bias that the trainer's has.

    vLLM 0.32 does so when it meets the bias among a folder's weights. Of a version that does not the bias has no
    counterpart, and the model is refused.
    """
    head = getattr(model, family.head.served, None)
    if f"{family.language_head}.bias" in shapes and getattr(head, "bias", None) is None:
        getattr(head, "_register_bias", lambda: None)()


def tie_embeddings_as_trained(model_config: Any, tied: bool) -> None:
    """Let vLLM's next model have one matrix for both embeddings, or two, as the trainer's has.

    Newer versions of vLLM decide by comparing the folder's weights once they are loaded; here they come later.
    """
    for config in (model_config.hf_config, model_config.hf_config.get_text_config()):
        config.tie_word_embeddings = tied
    if hasattr(model_config, "word_embeddings_untied_by_checkpoint"):
        model_config.word_embeddings_untied_by_checkpoint = False
