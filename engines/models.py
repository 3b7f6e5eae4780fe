"""The models a rank trains or asks: a causal LM that returns log-probs of chosen tokens, a critic, a reward model.

Each wraps a Hugging Face backbone and runs it on packed tokens. The language head sees only the positions that
predict response tokens, in chunks whose logits live no longer than the chunk: a chunk is recomputed in the backward
pass, so memory holds hidden states and never `tokens x vocabulary`.

Suffixes: `_N` all tokens of a micro-batch, `_T` response tokens, `_TH` times hidden size, `_TV` times vocabulary.
Left out: losses (algorithms/), optimizers (engines/trainer.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from configs.errors import UserError
from engines.attention import NAME as PACKED_ATTENTION
from engines.packing import PackedBatch

Entropy = Literal["none", "value", "gradient"]  # not wanted, to be reported, or part of the loss
# What some models do to scores and logits outside the layers that are called here.
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")
LOGITS_CHUNK_BYTES = 1 << 28  # of float32 logits at a time: large enough for full speed, small beside the weights


class PackedPolicy(nn.Module):
    """A causal LM: packed tokens in, log-probs (and entropies) of the response tokens out."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, batch: PackedBatch, temperature: float, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs_T and entropies_T (float32) of the response tokens at the sampling temperature."""
        hidden_TH = _hidden_states(self.lm.base_model, batch).index_select(0, batch.predict_T)
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self.lm.config.vocab_size))
        logprobs, entropies = [], []
        for hidden_CH, targets_C in zip(hidden_TH.split(chunk), batch.targets_T.split(chunk), strict=True):
            logprobs_C, entropy_C = self._chunk(hidden_CH, targets_C, temperature, entropy)
            logprobs.append(logprobs_C)
            entropies.append(entropy_C)
        return torch.cat(logprobs), None if entropy == "none" else torch.cat(entropies)

    def _chunk(self, hidden_CH: torch.Tensor, targets_C: torch.Tensor, temperature: float, entropy: Entropy) -> Any:
        arguments = (self.lm.lm_head, hidden_CH, targets_C, temperature, entropy)
        if torch.is_grad_enabled():
            return checkpoint(_selected_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False)
        return _selected_logprobs(*arguments)


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
        last_B = batch.layout.cu_seqlens_B1[1:].long() - 1
        hidden_BH = _hidden_states(self.classifier.base_model, batch).index_select(0, last_B)
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


def _selected_logprobs(
    head: nn.Module, hidden_CH: torch.Tensor, targets_C: torch.Tensor, temperature: float, entropy: Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits_CV = head(hidden_CH).float() / temperature
    logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
    chosen_C = logprobs_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return chosen_C, None
    if entropy == "value":
        logprobs_CV = logprobs_CV.detach()
    return chosen_C, -(logprobs_CV.exp() * logprobs_CV).sum(-1)


def load_causal_lm(path: str | Path, dtype: torch.dtype, gradient_checkpointing: bool) -> PreTrainedModel:
    """Load a causal LM folder with packed attention, on the CPU.

    Raises:
        UserError: the folder is no Hugging Face model, or it needs an attention that packing does not provide.
    """
    lm = _load(AutoModelForCausalLM, path, dtype)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def load_reward_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a sequence classifier with one label.

    Raises:
        UserError: it has several labels, or see `load_causal_lm`.
    """
    classifier = _load(AutoModelForSequenceClassification, path, dtype)
    if classifier.config.num_labels != 1 or not hasattr(classifier, "score"):
        raise UserError(
            f"{path} is no reward model: it has {classifier.config.num_labels} labels, or no 'score' head",
            "train or export it as a sequence classifier with one label",
        )
    return classifier


def _load(kind: Any, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if unknown := [name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 1.0)]:
        raise UserError(
            f"{path} sets '{unknown[0]}': it changes scores or logits in a way that packed training does not provide",
            "use another model",
        )
    return kind.from_pretrained(path, dtype=dtype, local_files_only=True, attn_implementation=PACKED_ATTENTION)
