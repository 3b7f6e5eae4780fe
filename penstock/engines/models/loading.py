"""Models from their folders and back: language models, reward models, with the check that packing runs them rightly.

Left out: what a packed forward pass does with them (models.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from penstock.base.errors import UserError
from penstock.base.files import share_weights_of
from penstock.base.model_code import Code, trusted
from penstock.engines.families.architecture import check_architecture, classifies, unpackable
from penstock.engines.families.images import sees
from penstock.engines.families.table import family_of
from penstock.engines.kernels.attention import NAME as PACKED_ATTENTION
from penstock.engines.kernels.mixers import keep_rows_apart
from penstock.engines.models.peft import ADAPTER_FOLDER, write_adapter
from penstock.engines.models.seeing import freeze_encoder
from penstock.engines.weights.experts import all_experts, cut_parameters
from penstock.engines.weights.layout import family_in
from penstock.engines.weights.lora import adapted_layers, merged_state

DECODER_PACKED = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    code: Code | None = None,
    train_encoder: bool = False,
) -> PreTrainedModel:
    """Load a causal LM folder with packed attention, on the CPU.

    Args:
        code: that a folder is trusted to bring.
        train_encoder: leave the encoder of images, if there is one, to be trained.

    Raises:
        UserError: packed training does not provide all that the model does (penstock/engines/families/architecture.py),
            or the folder brings other code.
    """
    lm = _load(AutoModelForCausalLM, path, dtype, code)
    if not train_encoder:
        freeze_encoder(lm)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def causal_lm_shapes(path: str | Path, dtype: torch.dtype, code: Code | None = None) -> PreTrainedModel:
    """Return a causal LM folder's model on the meta device: names, shapes and settings without weights."""
    own = trusted(path, code)
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=own)
    with torch.device("meta"):
        lm: PreTrainedModel = kind_for(config).from_config(config, dtype=dtype, trust_remote_code=own)
    hold_corrections(lm)
    if (Path(path) / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return lm


def load_reward_model(
    path: str | Path, dtype: torch.dtype, code: Code | None = None, **settings: Any
) -> PreTrainedModel:
    """Load a sequence classifier with one label.

    Raises:
        UserError: it has several labels, or see `load_causal_lm`.
    """
    classifier = _load(AutoModelForSequenceClassification, path, dtype, code, **settings)
    if classifier.config.num_labels != 1 or not hasattr(classifier, "score"):
        raise UserError(
            f"{path} is no reward model: it has {classifier.config.num_labels} labels, or no 'score' head",
            "train or export it as a sequence classifier with one label",
        )
    return classifier


def start_reward_model(
    path: str | Path, dtype: torch.dtype, gradient_checkpointing: bool, code: Code | None = None
) -> PreTrainedModel:
    """Make a reward model of a causal LM folder, its score 0 for every text; a reward model's folder goes on as it is.

    Raises:
        UserError: see `load_reward_model`.
    """
    classifier: Any = load_reward_model(path, dtype, code, num_labels=1)
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusted(path, code))
    if not classifies(config.to_dict()):
        nn.init.zeros_(classifier.score.weight)
    if gradient_checkpointing:
        classifier.gradient_checkpointing_enable({"use_reentrant": False})
    trained: PreTrainedModel = classifier
    return trained


def _load(kind: Any, path: str | Path, dtype: torch.dtype, code: Code | None, **settings: Any) -> PreTrainedModel:
    own = trusted(path, code)
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=own)
    head = kind is AutoModelForCausalLM
    kind = kind_for(config) if head else kind
    _check_packable(kind, config, path, own, head)
    keep_corrections_exact(kind, config)
    model: PreTrainedModel = kind.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=own,
        use_safetensors=True,
        attn_implementation=DECODER_PACKED if sees(config.to_dict()) else PACKED_ATTENTION,
        **settings,
    )
    hold_corrections(model)
    keep_rows_apart(model)
    return model


def keep_corrections_exact(automatic: Any, config: Any) -> None:
    """Let the library read by which routers correct their choices in float32: of some families it would round it.

    Args:
        automatic: the library's class that finds the model's own.
    """
    family = family_of(config.model_type)
    if family.corrected and type(config) in automatic._model_mapping:
        kind = automatic._model_mapping[type(config)]
        kind._keep_in_fp32_modules_strict = sorted({*(kind._keep_in_fp32_modules_strict or ()), *family.corrections})


def hold_corrections(model: nn.Module) -> None:
    """Make parameters that rest of the numbers by which routers correct their choices: no gradient reaches them.

    As in vLLM, whose a reshard compares with them. Shards, too, are made and gathered of parameters alone.
    """
    corrections = family_in(model).corrections
    for module in model.modules():
        for name, values in [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]:
            if name in corrections:
                setattr(module, name, nn.Parameter(values, requires_grad=False))


def in_float32(module: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """Return what rests in a model in float32, whatever the others are: by what routers correct their choices."""
    resting = (parameter for parameter in module.parameters() if not parameter.requires_grad)
    return {parameter: parameter.data for parameter in resting if parameter.dtype is torch.float32}


def kind_for(config: Any) -> Any:
    """Return the class by which the library loads a language model of this configuration."""
    return AutoModelForImageTextToText if sees(config.to_dict()) else AutoModelForCausalLM


def _check_packable(kind: Any, config: Any, path: str | Path, own: bool, head: bool) -> None:
    """Check a model's configuration, names and class, its `own` or the library's, before its weights are read."""
    with torch.device("meta"):
        shapes = kind.from_config(config, trust_remote_code=own)
    names = (name for name, _ in shapes.named_parameters())
    check_architecture(config.to_dict(), names, path, head)
    known = bool(family_in(shapes).mixers)
    if shapes._is_stateful and not known:
        raise unpackable(path, "carries a state from token to token")
    if not shapes._supports_attention_backend and not known:
        raise unpackable(path, "has an attention of its own, which cannot be replaced")


@torch.no_grad()
def write_model(lm: Any, folder: Path, rank: int) -> None:
    """Write a model as a Hugging Face folder, also a sharded one: all ranks gather, the first one writes.

    A model with adapters is written merged, and its adapters by themselves in the folder `adapter` inside.
    """
    sharded = hasattr(next(lm.parameters()), "ds_id")
    state = lm.state_dict()
    if rank == 0 and adapted_layers(lm):
        state = merged_state(lm)
        if not hasattr(lm, "score"):  # a reward model's adapter would lack the trained head
            write_adapter(lm, folder / ADAPTER_FOLDER)
    state |= _whole_experts(lm, rank)
    if sharded:
        state = gathered_state(lm, rank)
    if rank == 0:
        lm.save_pretrained(folder, state_dict=_in_host_memory(state))
        share_weights_of(folder)
    torch.distributed.barrier()


def _whole_experts(lm: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Return what lies on several ranks, in host memory on rank 0, nothing on the others; all ranks call it."""
    state = {}
    for name, parameter in cut_parameters(lm).items():
        whole = all_experts(parameter)
        if rank == 0:
            state[name] = whole.cpu()
    return state


def gathered_state(lm: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Return a sharded model's whole parameters in host memory on rank 0, nothing on the others; all ranks call it."""
    import deepspeed

    state = {}
    for name, parameter in lm.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            if rank == 0:
                state[name] = parameter.data.to("cpu", copy=True)
    return state


def _in_host_memory(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors off the GPU; tied ones stay one.

    They lie in one flat buffer on the GPU. Transformers copies tensors that share memory, which for a large model would
    need memory that the GPU does not have.
    """
    copies = {tensor.data_ptr(): tensor for tensor in state.values()}
    copies = {address: tensor.cpu() for address, tensor in copies.items()}
    return {name: copies[tensor.data_ptr()] for name, tensor in state.items()}
