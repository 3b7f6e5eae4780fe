"""Adapters alone as a folder of PEFT's format, for the model that a training started from.

Of experts, too, which PEFT knows as `target_parameters`: there the pairs of all experts lie in one A and one B, and of
two parameters of one module the first one's adapter is a layer further in. Tests compare with PEFT itself.

Suffixes: `_RI` rank x in, `_OR` out x rank; with `_E` of each expert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.base.files import share_weights_of
from penstock.engines.weights.lora import Adapted, LoraExperts, LoraLinear, adapted_layers

PREFIX = "base_model.model."

ADAPTER_FOLDER = "adapter"  # beside merged weights: transformers would take an adapter among them for a part of them


def write_adapter(lm: Any, folder: Path) -> None:
    """Write a model's adapters: adapter_config.json and adapter_model.safetensors."""
    layers = adapted_layers(lm)
    config = next(iter(layers.values())).config
    folder.mkdir(parents=True)
    pairs = {place: pair for name, layer in layers.items() for place, pair in _placed(name, layer, layers).items()}
    tensors = {
        f"{PREFIX}{place}.{factor}.weight": value.cpu().contiguous()
        for place, pair in pairs.items()
        for factor, value in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(lm.name_or_path).name or None,  # the path itself is nobody else's business
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name, one in layers.items() if isinstance(one, LoraLinear)}),
        **_parameters(layers),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    share_weights_of(folder, "adapter_config.json")


def _placed(name: str, layer: Adapted, layers: Mapping[str, Adapted]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return where PEFT has the pair of what is called `name`, and the pair as PEFT has it."""
    module = name.rpartition(".")[0]
    if isinstance(layer, LoraLinear):
        return {module: (layer.lora_A.detach(), layer.lora_B.detach())}
    *_, last = (other for other in layers if other.rpartition(".")[0] == module)
    place = module if name == last else f"{module}.base_layer"
    return {place: (layer.lora_A.detach().flatten(0, 1), layer.lora_B.detach().permute(1, 2, 0).flatten(1))}


def _parameters(layers: Mapping[str, Adapted]) -> dict[str, list[str]]:
    """Return the setting by which PEFT finds experts; none where they have no adapters."""
    experts = [name for name, layer in layers.items() if isinstance(layer, LoraExperts)]
    return {"target_parameters": sorted({".".join(name.split(".")[-3:]) for name in experts})} if experts else {}
