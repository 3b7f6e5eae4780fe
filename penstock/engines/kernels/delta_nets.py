"""Gated delta nets (Qwen3-Next, Qwen3.5) in vLLM on a CPU: by the library's functions, of which the trainer makes its.

vLLM 0.32 has kernels for them on a CPU that take bfloat16 alone. Here the functions of the Transformers library take
their place, inside the same operator of vLLM's: a sequence's prompt in chunks, after it a token of each sequence at a
time, from the states that vLLM keeps for them. They compute in float32, whatever the weights are.

A state is what vLLM allots to a sequence: the last inputs of the convolution, in the weights' dtype, and the delta
rule's matrix, in float32, as keys by values of each head (arXiv 2412.06464). Suffixes: `_NC` tokens of a step x
channels of the convolution (queries, keys and values), `_NV` tokens x value heads, `_NVD` and the size of a value;
`_SCL` kept sequences x channels x inputs, `_SVKD` kept sequences x value heads x key x value.
Left out: GPUs, where vLLM's own kernels take bfloat16 and stay, and speculative decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


def write_delta_nets_out() -> None:
    """Let vLLM's layers on CPUs compute gated delta nets here, once they are built."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    replaced: Any = gdn_attention
    compute_step.__annotations__["layer_name"] = replaced.LayerNameType  # vLLM reads the operator's types off here
    replaced.cpu_gdn_attention_core = compute_step


def compute_step(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: str
) -> None:
    """Compute what a layer has for the tokens of a step, into `core_attn_out`, and move its states on.

    The parameters are those by which vLLM calls it: queries, keys and values before the convolution, [N, C]; what
    makes the update's strength and the decay, each [N, V]; [N, V, D]; and how the layer finds itself.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures its memory with it
        return
    step = context.attn_metadata[layer.prefix]
    if not step.num_actual_tokens:
        return
    states, slots_S = _States.of(layer), step.non_spec_state_indices_tensor.long()
    decoded = step.num_decode_tokens
    if decoded:
        slots = slots_S[: step.num_decodes]
        core_attn_out[:decoded] = _one_token_each(layer, states, slots, mixed_qkv[:decoded], b[:decoded], a[:decoded])
    ends = step.non_spec_query_start_loc.tolist()
    for number in range(step.num_decodes, step.num_decodes + step.num_prefills):
        span, slot = slice(ends[number], ends[number + 1]), slots_S[number : number + 1]
        if not step.has_initial_state[number]:
            states.forget(slot)
        core_attn_out[span] = _one_sequence(layer, states, slot, mixed_qkv[span], b[span], a[span])


@dataclass(frozen=True)
class _States:
    """What vLLM keeps of a layer for each sequence, in slots that it counts."""

    inputs_SCL: torch.Tensor
    rule_SVKD: torch.Tensor

    @staticmethod
    def of(layer: Any) -> _States:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        inputs, rule = layer.kv_cache[0], layer.kv_cache[1]
        slots, heads, values, keys = rule.shape  # vLLM's CPU kernels, too, keep keys by values in it
        inputs_SCL = inputs if is_conv_state_dim_first() else inputs.transpose(1, 2)
        return _States(inputs_SCL, rule.view(slots, heads, keys, values))

    def forget(self, slots_S: torch.Tensor) -> None:
        """Begin these anew: a slot holds what its last sequence left."""
        self.inputs_SCL[slots_S] = 0
        self.rule_SVKD[slots_S] = 0


def _one_token_each(
    layer: Any, states: _States, slots_S: torch.Tensor, qkv_SC: torch.Tensor, b_SV: torch.Tensor, a_SV: torch.Tensor
) -> torch.Tensor:
    """Return [S, V, D] of one more token of each sequence."""
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    rule, mixed_S1C = library.torch_recurrent_gated_delta_rule, _convolved(layer, states, slots_S, qkv_SC[:, None])
    return _ruled(rule, layer, states, slots_S, mixed_S1C, b_SV[:, None], a_SV[:, None])[:, 0]


def _one_sequence(
    layer: Any, states: _States, slot_1: torch.Tensor, qkv_NC: torch.Tensor, b_NV: torch.Tensor, a_NV: torch.Tensor
) -> torch.Tensor:
    """Return [N, V, D] of one sequence's next tokens."""
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    rule, mixed_1NC = library.torch_chunk_gated_delta_rule, _convolved(layer, states, slot_1, qkv_NC[None])
    return _ruled(rule, layer, states, slot_1, mixed_1NC, b_NV[None], a_NV[None])[0]


def _convolved(layer: Any, states: _States, slots_S: torch.Tensor, qkv_SNC: torch.Tensor) -> torch.Tensor:
    """Return [S, N, C] after the convolution and its activation; keep its last inputs."""
    weight_C1L = layer.conv1d.weight
    kept = weight_C1L.shape[-1] - 1
    inputs_SCN = torch.cat([states.inputs_SCL[slots_S, :, :kept], qkv_SNC.transpose(1, 2)], dim=-1)
    states.inputs_SCL[slots_S, :, :kept] = inputs_SCN[..., -kept:]
    mixed_SCN = functional.conv1d(inputs_SCN, weight_C1L, layer.conv1d.bias, groups=len(weight_C1L))
    return functional.silu(mixed_SCN).transpose(1, 2)


def _ruled(
    rule: Any,
    layer: Any,
    states: _States,
    slots_S: torch.Tensor,
    mixed_SNC: torch.Tensor,
    b_SNV: torch.Tensor,
    a_SNV: torch.Tensor,
) -> torch.Tensor:
    """Return [S, N, V, D] by the delta rule from each sequence's state; keep the state at its end."""
    sizes = [size // layer.tp_size for size in (layer.key_dim, layer.key_dim, layer.value_dim)]
    query, key, value = mixed_SNC.split(sizes, dim=-1)
    query, key = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (query, key))
    repeats = layer.num_v_heads // layer.num_k_heads
    decay_SNV = -layer.A_log.float().exp() * functional.softplus(a_SNV.float() + layer.dt_bias)
    out_SNVD, rule_SVKD = rule(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=decay_SNV,
        beta=b_SNV.sigmoid(),
        initial_state=states.rule_SVKD[slots_S],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states.rule_SVKD[slots_S] = rule_SVKD
    out: torch.Tensor = out_SNVD
    return out
