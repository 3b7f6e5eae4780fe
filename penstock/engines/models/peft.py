"""Adapters alone as a folder of PEFT's format, for the model that a training started from.

Of experts, too, which PEFT knows as `target_parameters`: there the pairs of all experts lie in one A and one B, and of
two parameters of one module the first one's adapter is a layer further in. In a mixture the linear layers of MLPs are
named so as well, since PEFT takes their names among `target_modules` for the experts'. Tests compare with PEFT itself.

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
from penstock.engines.weights.layout import family_in
from penstock.engines.weights.lora import Adapted, LoraLinear, adapted_layers

PREFIX = "base_model.model."

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # as experts were called before the library stacked them

ADAPTER_FOLDER = "adapter"  # beside merged weights: transformers would take an adapter among them for a part of them


def write_adapter(lm: Any, folder: Path) -> None:
    """Write a model's adapters: adapter_config.json and adapter_model.safetensors."""
    layers = adapted_layers(lm)
    config = next(iter(layers.values())).config
    modules, parameters = _targets(layers, mixture=bool(family_in(lm).experts))
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
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
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


def _targets(layers: Mapping[str, Adapted], mixture: bool) -> tuple[list[str], list[str]]:
    """Return by which names PEFT finds modules, and by which ends of names it finds parameters."""
    moved = OF_EXPERTS if mixture else ()
    linears = {name: name.split(".")[-2] for name, layer in layers.items() if isinstance(layer, LoraLinear)}
    modules = {module for module in linears.values() if module not in moved}
    parameters = {".".join(name.split(".")[-3:]) for name in layers if linears.get(name) not in modules}
    return sorted(modules), sorted(parameters)
