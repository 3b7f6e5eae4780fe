"""Log-probs of chosen tokens, entropies and divergences from hidden states, without holding a micro-batch's logits.

Logits exist for a chunk of tokens at a time, in the forward pass for three sums per token, and once more in the
backward pass, where they turn into their own gradient and are multiplied away. On a GPU the arithmetic between the
matrix products is compiled into one kernel each way. Per token and vocabulary entry that is four matrix products
(one of them the recomputation) and about 14 bytes, against some 60 bytes for autograd on float32 logits.
Where memory allows (penstock/engines/sizing/memory.py) the logits are kept for the backward pass, in the weights'
dtype, and the fourth product is spared.

Source of the gradient: with z = logits / temperature, p = softmax(z), H = entropy, D = sum of p (log p - log q):
d log p_chosen / dz = onehot - p;  dH / dz = -p (log p + H);  dD / dz = p (log p - log q - D).

The divergence D from a reference q, over the whole vocabulary, needs the reference's final hidden states and its
language head: its logits exist for the same chunk of tokens, and are made again in the backward pass like the model's
own. That is two matrix products more; a chunk is half as long, so that both models' logits take what one's took.

Some models cap and scale their logits (penstock/engines/families/logits.py). A factor is part of the temperature; of a
cap c the logits are c tanh(raw / c), and the gradient by the raw ones has the factor 1 - tanh(raw / c)^2.

Suffixes: `_T` tokens, `_C` tokens of a chunk, `_H` hidden size, `_V` vocabulary (`_K` blocks of `_B` entries); `raw`
logits are unscaled. A head may have a bias, whose gradient is the sum of the raw logits' over the tokens; the product
adds it, as a linear layer does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engines.families.logits import LogitRule
from penstock.engines.kernels.weight_gradients import add_weight_gradient

LOGITS_CHUNK_BYTES = 1 << 30  # of logits in the weights' dtype at a time: full speed from 2,000 tokens on
VOCABULARY_BLOCKS = (64, 1024)  # entries: the least and the most that are worth a block


@dataclass(frozen=True)
class Reference:
    """What the reference's distributions are made of; no gradient flows into it."""

    hidden_TH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None = None


class Head(NamedTuple):
    """A language head."""

    weight_VH: Tensor
    bias_V: Tensor | None = None


NO_RULE = LogitRule()


class Statistics(NamedTuple):
    """What the forward pass knows of tokens and the backward pass needs again; the last two if there is a reference."""

    normalizer_T: Tensor  # its logarithm
    entropy_T: Tensor
    reference_normalizer_T: Tensor | None
    kl_T: Tensor | None

    def cut(self, chunk: slice) -> Statistics:
        """Return those of a chunk of the tokens."""
        normalizer_T, entropy_T, *of_reference = self
        return Statistics(normalizer_T[chunk], entropy_T[chunk], *(_cut(values_T, chunk) for values_T in of_reference))


class Gradients(NamedTuple):
    """Gradients of the loss by what the forward pass returned; None where it does not depend on that."""

    logprobs_T: Tensor | None
    entropies_T: Tensor | None
    kl_T: Tensor | None

    def cut(self, chunk: slice) -> Gradients:
        """Return those of a chunk of the tokens."""
        return Gradients(*(_cut(values_T, chunk) for values_T in self))


def selected_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    keep_logits: bool = False,
    sum_VH: Tensor | None = None,
    rule: LogitRule = NO_RULE,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of `targets_T` and the entropies of their distributions, both float32 and differentiable.

    Args:
        hidden_TH: final hidden states of the positions that predict the targets.
        weight_VH: the language head.
        targets_T: token ids.
        temperature: logits are divided by it.
        keep_logits: hold them for the backward pass, if there will be one.
        sum_VH: float32; the head's gradient is added to it, and autograd sees none.
        rule: what the model does to its logits.
        bias_V: the language head's, if it has one.
    """
    scale, kept_TV = _scale(hidden_TH, temperature, rule), None
    if keep_logits and torch.is_grad_enabled():
        kept_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH))
    logprobs_T, entropies_T, _ = _SelectedLogprobs.apply(
        hidden_TH, weight_VH, bias_V, targets_T, scale, rule.cap, kept_TV, sum_VH, None, None, None
    )
    return logprobs_T, entropies_T


def selected_logprobs_and_kl(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    reference: Reference,
    sum_VH: Tensor | None = None,
    rule: LogitRule = NO_RULE,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `selected_logprobs` does, and KL(p, q) per token to the reference's distributions, differentiable.

    The reference's logits are divided by the same temperature, and are of the same rule. Equal states and heads give
    exactly 0.
    """
    scale = _scale(hidden_TH, temperature, rule)
    of_reference = reference.hidden_TH, reference.weight_VH, reference.bias_V
    logprobs_T, entropies_T, kl_T = _SelectedLogprobs.apply(
        hidden_TH, weight_VH, bias_V, targets_T, scale, rule.cap, None, sum_VH, *of_reference
    )
    return logprobs_T, entropies_T, kl_T


def _scale(hidden_TH: Tensor, temperature: float, rule: LogitRule) -> Tensor:
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    return torch.full((), rule.factor / temperature, dtype=dtype, device=hidden_TH.device)


class _SelectedLogprobs(torch.autograd.Function):
    # Each tensor is a parameter: autograd sees those alone that are handed in by themselves.
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        scale: Tensor,
        cap: float | None,
        kept_TV: Tensor | None,
        sum_VH: Tensor | None,
        reference_TH: Tensor | None,
        reference_VH: Tensor | None,
        reference_V: Tensor | None,
    ) -> Any:
        statistics = _on(hidden_TH.device.type, _statistics)
        parts = [
            statistics(
                _logits(
                    hidden_TH, weight_VH, bias_V, chunk, _cut(kept_TV, chunk)
                ),  # not held longer than for this call
                targets_T[chunk],
                scale,
                cap,
                _logits(reference_TH, reference_VH, reference_V, chunk),
            )
            for chunk in _chunks(hidden_TH, weight_VH, reference_VH)
        ]
        chosen_T, known = torch.cat([chosen_C for chosen_C, _ in parts]), _joined([part for _, part in parts])
        of_reference = reference_TH, reference_VH, reference_V
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, scale, *known, kept_TV, *of_reference)
        ctx.set_materialize_grads(False)
        ctx.cap = cap
        ctx.sum_VH = sum_VH  # it is written to, not read: other forward passes may come before the backward pass
        return chosen_T, known.entropy_T, known.kl_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropies_T: Tensor | None, grad_kl_T: Tensor | None
    ) -> Any:
        hidden_TH, weight_VH, bias_V, targets_T, scale, *others = ctx.saved_tensors
        *saved, kept_TV, reference_TH, reference_VH, reference_V = others
        gradient = _on(hidden_TH.device.type, _logits_gradient)
        known, grads = Statistics(*saved), Gradients(grad_logprobs_T, grad_entropies_T, grad_kl_T)
        grad_hidden_TH = torch.empty_like(hidden_TH)
        trained = ctx.needs_input_grad[1]  # a frozen head needs no gradient
        grad_weight_VH = torch.empty_like(weight_VH) if trained and ctx.sum_VH is None else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=scale.dtype) if ctx.needs_input_grad[2] else None
        for chunk in _chunks(hidden_TH, weight_VH, reference_VH):
            grad_CV = gradient(
                _logits(hidden_TH, weight_VH, bias_V, chunk) if kept_TV is None else _whole_vocabulary(kept_TV[chunk]),
                targets_T[chunk],
                scale,
                ctx.cap,
                known.cut(chunk),
                grads.cut(chunk),
                _logits(reference_TH, reference_VH, reference_V, chunk),
            )
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[chunk])
            if trained and ctx.sum_VH is not None:
                add_weight_gradient(ctx.sum_VH, grad_CV, hidden_TH[chunk])
            if grad_weight_VH is not None:  # beta 0 does not read what the buffer held before the first chunk
                torch.addmm(grad_weight_VH, grad_CV.t(), hidden_TH[chunk], beta=min(chunk.start, 1), out=grad_weight_VH)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0, dtype=scale.dtype)
            del grad_CV  # else it would still be there while the next one is made
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TH, grad_weight_VH, grad_bias_V, *[None] * 8


def _chunks(hidden_TH: Tensor, weight_VH: Tensor, reference_VH: Tensor | None) -> list[slice]:
    models, tokens = 1 if reference_VH is None else 2, max(1, len(hidden_TH))
    most = max(1, LOGITS_CHUNK_BYTES // (models * weight_VH.shape[0] * weight_VH.element_size()))
    rows = -(-tokens // -(-tokens // most))  # of equal length: a short last one would use a GPU poorly
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def _cut(values_T: Tensor | None, chunk: slice) -> Tensor | None:
    return None if values_T is None else values_T[chunk]


def _joined(parts: list[Statistics]) -> Statistics:
    """Statistics of all tokens from those of the chunks."""
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    normalizer_T, entropy_T, *of_reference = columns
    assert normalizer_T is not None and entropy_T is not None
    return Statistics(normalizer_T, entropy_T, *of_reference)


def _logits(
    hidden_TH: Tensor | None,
    weight_VH: Tensor | None,
    bias_V: Tensor | None,
    chunk: slice,
    out_CV: Tensor | None = None,
) -> Tensor | None:
    if hidden_TH is None or weight_VH is None:
        return None
    if bias_V is not None:
        return _whole_vocabulary(torch.addmm(bias_V, hidden_TH[chunk], weight_VH.t(), out=out_CV))
    return _whole_vocabulary(torch.mm(hidden_TH[chunk], weight_VH.t(), out=out_CV))


def _whole_vocabulary(logits_CV: Tensor) -> Tensor:
    """Tell the compiler that only the number of tokens varies: kernels that divide by a variable take twice as long."""
    torch._dynamo.mark_static(logits_CV, 1)
    return logits_CV


def _scaled(raw_CV: Tensor, scale: Tensor, cap: float | None) -> Tensor:
    logits_CV = raw_CV.to(scale.dtype)
    return (logits_CV if cap is None else cap * (logits_CV / cap).tanh()) * scale


def _normalizer(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the normaliser; the sums of e^(logit - largest), and of the same times the logit.

    First within blocks of the vocabulary (`_CKB`), which fit into a GPU's registers, then over blocks (`_CK`): so the
    logits are read once, not a second time when their largest is known.
    """
    logits_CKB = logits_CV.unflatten(-1, (-1, _block(logits_CV.shape[-1])))
    largest_CK = logits_CKB.amax(-1)
    weights_CKB = (logits_CKB - largest_CK.unsqueeze(-1)).exp()
    sums_CK, weighted_CK = weights_CKB.sum(-1), (weights_CKB * logits_CKB).sum(-1)
    largest_C1 = largest_CK.amax(-1, keepdim=True)
    share_CK = (largest_CK - largest_C1).exp()
    sum_C, weighted_C = (sums_CK * share_CK).sum(-1), (weighted_CK * share_CK).sum(-1)
    return largest_C1.squeeze(-1) + sum_C.log(), sum_C, weighted_C


def _block(vocabulary: int) -> int:
    """Return the largest power of two that divides the vocabulary, within limits; else the vocabulary."""
    least, most = VOCABULARY_BLOCKS
    block = math.gcd(vocabulary, most)
    return block if block >= least else vocabulary


def _statistics(
    raw_CV: Tensor, targets_C: Tensor, scale: Tensor, cap: float | None, raw_reference_CV: Tensor | None
) -> tuple[Tensor, Statistics]:
    """Log-prob of the target, and what else is known of the tokens of a chunk."""
    logits_CV = _scaled(raw_CV, scale, cap)
    normalizer_C, sum_C, weighted_C = _normalizer(logits_CV)
    chosen_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    logprob_C, entropy_C = chosen_C - normalizer_C, normalizer_C - weighted_C / sum_C
    if raw_reference_CV is None:
        return logprob_C, Statistics(normalizer_C, entropy_C, None, None)
    reference_CV = _scaled(raw_reference_CV, scale, cap)
    reference_normalizer_C, _, _ = _normalizer(reference_CV)
    logprobs_CV = logits_CV - normalizer_C.unsqueeze(-1)
    ratio_CV = logprobs_CV - (reference_CV - reference_normalizer_C.unsqueeze(-1))
    kl_C = (logprobs_CV.exp() * ratio_CV).sum(-1)
    return logprob_C, Statistics(normalizer_C, entropy_C, reference_normalizer_C, kl_C)


def _logits_gradient(
    raw_CV: Tensor,
    targets_C: Tensor,
    scale: Tensor,
    cap: float | None,
    known: Statistics,
    grads: Gradients,
    raw_reference_CV: Tensor | None,
) -> Tensor:
    """Gradient of the loss by the logits of a chunk, before scaling, in the weights' dtype."""
    normalizer_C, entropies_C, reference_normalizer_C, kl_C = known
    grad_logprobs_C, grad_entropies_C, grad_kl_C = grads
    logprobs_CV = _scaled(raw_CV, scale, cap) - normalizer_C.unsqueeze(-1)
    probs_CV = logprobs_CV.exp()
    grad_CV = torch.zeros_like(probs_CV)
    if grad_logprobs_C is not None:
        vocabulary_V = torch.arange(raw_CV.shape[1], device=targets_C.device)
        chosen_CV = (vocabulary_V == targets_C.unsqueeze(-1)).to(probs_CV.dtype)
        grad_CV = grad_CV + grad_logprobs_C.unsqueeze(-1) * (chosen_CV - probs_CV)
    if grad_entropies_C is not None:
        spread_CV = logprobs_CV + entropies_C.unsqueeze(-1)
        grad_CV = grad_CV - grad_entropies_C.unsqueeze(-1) * probs_CV * spread_CV
    if grad_kl_C is not None and raw_reference_CV is not None:
        assert reference_normalizer_C is not None and kl_C is not None
        reference_CV = _scaled(raw_reference_CV, scale, cap) - reference_normalizer_C.unsqueeze(-1)
        excess_CV = logprobs_CV - reference_CV - kl_C.unsqueeze(-1)
        grad_CV = grad_CV + grad_kl_C.unsqueeze(-1) * probs_CV * excess_CV
    if cap is not None:
        grad_CV = grad_CV * (1 - (raw_CV.to(scale.dtype) / cap).tanh().square())
    return (grad_CV * scale).to(raw_CV.dtype)


@functools.cache
def _on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is on a CPU; compiled on a GPU, once for any number of tokens.

    There each kernel's threads lie in rows and columns, as the logits do: no index has to be divided.
    """
    if device != "cuda":
        return function
    return torch.compile(function, dynamic=True, options={"triton.prefer_nd_tiling": True})
