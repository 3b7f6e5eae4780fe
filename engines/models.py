"""The models a rank trains or asks: a causal LM that returns log-probs of chosen tokens, a critic, a reward model.

Each wraps a Hugging Face backbone and runs it on packed tokens. The language head sees only the positions that
predict response tokens (engines/logprobs.py).

Suffixes: `_N` all tokens of a micro-batch, `_T` response tokens, `_TH` times hidden size, `_TV` times vocabulary.
Left out: losses (algorithms/), optimizers (engines/trainer.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from configs.errors import UserError
from engines.architecture import check_architecture, unpackable
from engines.attention import NAME as PACKED_ATTENTION
from engines.logprobs import Reference, selected_logprobs, selected_logprobs_and_kl
from engines.lora import ADAPTER_FOLDER, adapted_layers, blocks, merged_state, write_adapter
from engines.packing import PackedBatch
from engines.versions import prepare_compiler
from state.files import share_weights_of


class PackedPolicy(nn.Module):
    """A causal LM: packed tokens in, log-probs and entropies of the response tokens out."""

    def __init__(self, lm: PreTrainedModel, keep_logits: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.head = LogprobHead(lm.lm_head, keep_logits)

    def forward(
        self, batch: PackedBatch, temperature: float, reference: Reference | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs_T and entropies_T (float32) of the response tokens at the sampling temperature.

        With a reference, the KL_T to its distributions comes third.
        """
        outputs: tuple[torch.Tensor, ...] = self.head(self.hidden(batch), batch.targets_T, temperature, reference)
        return outputs

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the final hidden states_TH of the tokens that predict the response."""
        return _hidden_states(self.lm.base_model, batch).index_select(0, batch.predict_T)


class LogprobHead(nn.Module):
    """The language head as a module of its own, so that ZeRO-3 gathers its weight for both passes."""

    def __init__(self, head: nn.Linear, keep_logits: bool) -> None:
        super().__init__()
        self.weight, self.keep_logits = head.weight, keep_logits
        self.sum_VH: torch.Tensor | None = None  # of its gradients, where the optimizer has one

    def forward(
        self, hidden_TH: torch.Tensor, targets_T: torch.Tensor, temperature: float, reference: Reference | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs_T and entropies_T of the targets, and KL_T to a reference if there is one."""
        if reference is None:
            return selected_logprobs(hidden_TH, self.weight, targets_T, temperature, self.keep_logits, self.sum_VH)
        return selected_logprobs_and_kl(hidden_TH, self.weight, targets_T, temperature, reference, self.sum_VH)


class PackedCritic(nn.Module):
    """A value model: a backbone with a scalar head; one value per response token, of the state before it."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = lm.base_model
        self.head = nn.Linear(lm.config.hidden_size, 1, dtype=lm.dtype)
        nn.init.zeros_(self.head.weight)  # values start at 0: the first advantages are the returns themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return values_T in float32."""
        hidden_TH = _hidden_states(self.backbone, batch).index_select(0, batch.predict_T)
        return self.head(hidden_TH).squeeze(-1).float()


class PackedRewardModel(nn.Module):
    """A sequence classifier with one label: the score of a whole sequence, read at its last token."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return scores_B in float32."""
        hidden_BH = _hidden_states(self.classifier.base_model, batch).index_select(0, batch.last_B)
        scores_B: torch.Tensor = self.classifier.score(hidden_BH)
        return scores_B.squeeze(-1).float()


def _hidden_states(backbone: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Run the transformer blocks on packed tokens; [N, hidden size]."""
    output = backbone(
        input_ids=batch.tokens_N.unsqueeze(0),
        position_ids=batch.positions_N.unsqueeze(0),
        use_cache=False,
        packing=batch.layout,
    )
    return output.last_hidden_state[0]


def compile_blocks(model: nn.Module) -> None:
    """Compile the transformer blocks of a Hugging Face model in place, each by itself, for any number of tokens.

    Blocks of one class share their compiled code. What lies between the matrix products (norms, rotary embedding,
    gated activation, residuals) becomes a few kernels; the products themselves stay the library's.
    """
    prepare_compiler()
    for block in blocks(model).values():
        block.compile(dynamic=True)


def load_causal_lm(path: str | Path, dtype: torch.dtype, gradient_checkpointing: bool) -> PreTrainedModel:
    """Load a causal LM folder with packed attention, on the CPU.

    Raises:
        UserError: packed training does not provide all that the model does (engines/architecture.py).
    """
    lm = _load(AutoModelForCausalLM, path, dtype)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def causal_lm_shapes(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal LM folder's model on the meta device: names, shapes and settings without weights."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(path) / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return lm


def load_reward_model(path: str | Path, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    """Load a sequence classifier with one label.

    Raises:
        UserError: it has several labels, or see `load_causal_lm`.
    """
    classifier = _load(AutoModelForSequenceClassification, path, dtype, **settings)
    if classifier.config.num_labels != 1 or not hasattr(classifier, "score"):
        raise UserError(
            f"{path} is no reward model: it has {classifier.config.num_labels} labels, or no 'score' head",
            "train or export it as a sequence classifier with one label",
        )
    return classifier


def start_reward_model(path: str | Path, dtype: torch.dtype, gradient_checkpointing: bool) -> PreTrainedModel:
    """Make a reward model of a causal LM folder, its score 0 for every text; a reward model's folder goes on as it is.

    Raises:
        UserError: see `load_reward_model`.
    """
    classifier: Any = load_reward_model(path, dtype, num_labels=1)
    if "ForSequenceClassification" not in str(
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).architectures
    ):
        nn.init.zeros_(classifier.score.weight)
    if gradient_checkpointing:
        classifier.gradient_checkpointing_enable({"use_reentrant": False})
    trained: PreTrainedModel = classifier
    return trained


def _load(kind: Any, path: str | Path, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    _check_packable(kind, path)
    return kind.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation=PACKED_ATTENTION,
        **settings,
    )


def _check_packable(kind: Any, path: str | Path) -> None:
    """Check a model's configuration, names and class before its weights are read."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        shapes = kind.from_config(config)
    names = (name for name, _ in shapes.named_parameters())
    check_architecture(config.to_dict(), names, path, head=kind is AutoModelForCausalLM)
    if shapes._is_stateful:
        raise unpackable(path, "carries a state from token to token")
    if not shapes._supports_attention_backend:
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
        if not hasattr(lm, "score"):  # without its head an adapter would be no reward model
            write_adapter(lm, folder / ADAPTER_FOLDER)
    if sharded:
        state = gathered_state(lm, rank)
    if rank == 0:
        lm.save_pretrained(folder, state_dict=_in_host_memory(state))
        share_weights_of(folder)
    torch.distributed.barrier()


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

    They lie in one flat buffer, and transformers copies what shares memory: of a large model to a full GPU.
    """
    copies = {tensor.data_ptr(): tensor for tensor in state.values()}
    copies = {address: tensor.cpu() for address, tensor in copies.items()}
    return {name: copies[tensor.data_ptr()] for name, tensor in state.items()}
