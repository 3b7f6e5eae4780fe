"""Log-probs of chosen tokens and entropies from hidden states, without ever holding the logits of a micro-batch.

Logits exist for a chunk of tokens at a time, in the forward pass for three sums per token, and once more in the
backward pass, where they turn into their own gradient and are multiplied away. On a GPU the arithmetic between the
matrix products is compiled into one kernel each way. Per token and vocabulary entry that is four matrix products
(one of them the recomputation) and about 14 bytes, against some 60 bytes for autograd on float32 logits.

Source of the gradient: with z = logits / temperature, p = softmax(z), H = entropy:
d log p_chosen / dz = onehot - p;  dH / dz = -p (log p + H).

Suffixes: `_T` tokens, `_C` tokens of a chunk, `_H` hidden size, `_V` vocabulary.
Left out: bias of the language head (refused when a model is loaded, engines/models.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOGITS_CHUNK_BYTES = 1 << 30  # of logits in the weights' dtype at a time: full speed from 2,000 tokens on


def selected_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of `targets_T` and the entropies of their distributions, both float32 and differentiable.

    Args:
        hidden_TH: final hidden states of the positions that predict the targets.
        weight_VH: the language head.
        targets_T: token ids.
        temperature: logits are divided by it.
    """
    scale = torch.full((), 1.0 / temperature, dtype=torch.float32, device=hidden_TH.device)
    logprobs_T, entropies_T = _SelectedLogprobs.apply(hidden_TH, weight_VH, targets_T, scale)
    return logprobs_T, entropies_T


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, scale: Tensor) -> Any:
        statistics, rows = _on(hidden_TH.device.type, _statistics), _chunk_rows(weight_VH)
        parts = [
            statistics(hidden_CH, weight_VH, targets_C, scale)
            for hidden_CH, targets_C in zip(hidden_TH.split(rows), targets_T.split(rows), strict=True)
        ]
        chosen_T, normalizer_T, entropies_T = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, scale, normalizer_T, entropies_T)
        ctx.set_materialize_grads(False)
        return chosen_T, entropies_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropies_T: Tensor | None) -> Any:
        hidden_TH, weight_VH, targets_T, scale, normalizer_T, entropies_T = ctx.saved_tensors
        gradient, rows = _on(hidden_TH.device.type, _logits_gradient), _chunk_rows(weight_VH)
        grad_hidden_TH, grad_weight_VH = torch.empty_like(hidden_TH), torch.empty_like(weight_VH)
        for start in range(0, len(hidden_TH), rows):
            chunk = slice(start, start + rows)
            grad_CV = gradient(
                hidden_TH[chunk],
                weight_VH,
                targets_T[chunk],
                scale,
                normalizer_T[chunk],
                entropies_T[chunk],
                None if grad_logprobs_T is None else grad_logprobs_T[chunk],
                None if grad_entropies_T is None else grad_entropies_T[chunk],
            )
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[chunk])
            # beta 0 does not read what the buffer held before the first chunk
            torch.addmm(grad_weight_VH, grad_CV.t(), hidden_TH[chunk], beta=min(start, 1), out=grad_weight_VH)
        return grad_hidden_TH, grad_weight_VH, None, None


def _chunk_rows(weight_VH: Tensor) -> int:
    return max(1, LOGITS_CHUNK_BYTES // (weight_VH.shape[0] * weight_VH.element_size()))


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, scale: Tensor) -> Tensor:
    return (hidden_CH @ weight_VH.t()).float() * scale


def _statistics(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log of the normaliser, entropy."""
    logits_CV = _scaled_logits(hidden_CH, weight_VH, scale)
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    weights_CV = (logits_CV - largest_C1).exp()
    sum_C, weighted_C = weights_CV.sum(-1), (weights_CV * logits_CV).sum(-1)
    normalizer_C = largest_C1.squeeze(-1) + sum_C.log()
    chosen_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return chosen_C - normalizer_C, normalizer_C, normalizer_C - weighted_C / sum_C


def _logits_gradient(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    scale: Tensor,
    normalizer_C: Tensor,
    entropies_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropies_C: Tensor | None,
) -> Tensor:
    """Gradient of the loss by the logits of a chunk, before scaling, in the weights' dtype."""
    logprobs_CV = _scaled_logits(hidden_CH, weight_VH, scale) - normalizer_C.unsqueeze(-1)
    probs_CV = logprobs_CV.exp()
    grad_CV = torch.zeros_like(probs_CV)
    if grad_logprobs_C is not None:
        vocabulary_V = torch.arange(weight_VH.shape[0], device=targets_C.device)
        chosen_CV = (vocabulary_V == targets_C.unsqueeze(-1)).to(probs_CV.dtype)
        grad_CV = grad_CV + grad_logprobs_C.unsqueeze(-1) * (chosen_CV - probs_CV)
    if grad_entropies_C is not None:
        spread_CV = logprobs_CV + entropies_C.unsqueeze(-1)
        grad_CV = grad_CV - grad_entropies_C.unsqueeze(-1) * probs_CV * spread_CV
    return (grad_CV * scale).to(hidden_CH.dtype)


@functools.cache
def _on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is on a CPU; compiled on a GPU, once for any number of tokens."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
