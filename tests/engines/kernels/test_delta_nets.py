"""Gated delta nets in vLLM's steps: prompts and single tokens of several sequences give what the library has of each.

The layer is the library's own, with what vLLM adds to its: states in slots. Metadata and context are vLLM's classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from penstock.benchmarks.workload.families import FAMILIES, SIZES
from penstock.engines.kernels.delta_nets import compute_step, write_delta_nets_out

SLOTS, LENGTHS = 4, (71, 9, 5)  # a prompt of more than a chunk of 64 tokens, and two short ones


@pytest.fixture
def layer() -> Any:
    """A layer whose slots hold what sequences before have left."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net: Any = Qwen3_5GatedDeltaNet(CONFIG_MAPPING["qwen3_5_text"](**{**SIZES, **FAMILIES["Qwen 3.5"][1]}), 0)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        inputs, rule = torch.randn(SLOTS, net.conv_kernel_size - 1, net.conv_dim), torch.randn(SLOTS, 4, 32, 32)
    net.prefix, net.tp_size, net.kv_cache = "linear_attn", 1, (inputs, rule)
    return net.requires_grad_(False)


def _step(layer: Any, hidden: list[torch.Tensor], slots: list[int], begun: list[bool]) -> list[torch.Tensor]:
    """Compute the next tokens of each sequence in a step of vLLM's; those with one token come first.

    Args:
        hidden: [tokens, hidden size] of each sequence.
        begun: which have a state.
    """
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    lengths, mixed_NH = torch.tensor([len(one) for one in hidden]), torch.cat(hidden)
    decodes, starts = sum(begun), torch.cat([torch.tensor([0]), lengths.cumsum(0)]).int()
    metadata = GDNAttentionMetadata(
        num_prefills=len(hidden) - decodes,
        num_prefill_tokens=len(mixed_NH) - decodes,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=len(mixed_NH),
        has_initial_state=torch.tensor(begun),
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )
    core_NVD = torch.zeros(len(mixed_NH), layer.num_v_heads, layer.head_v_dim)
    context = ForwardContext({layer.prefix: layer}, {layer.prefix: metadata}, {})  # type: ignore[dict-item]
    with override_forward_context(context):
        projected = (net(mixed_NH) for net in (layer.in_proj_qkv, layer.in_proj_b, layer.in_proj_a))
        compute_step(*projected, core_NVD, layer.prefix)
    gate_NVD = layer.in_proj_z(mixed_NH).view_as(core_NVD)
    normed_NVD = layer.norm(core_NVD.flatten(0, 1), gate_NVD.flatten(0, 1)).view_as(core_NVD)
    return list(layer.out_proj(normed_NVD.flatten(1)).split(lengths.tolist()))


def _generated(layer: Any, rows: list[torch.Tensor], slots: list[int]) -> list[torch.Tensor]:
    """Compute two rows' prompts, then their other tokens one by one, beside the prompt of a third that comes later.

    `slots`: of the sequences in the steps that follow on their prompts.
    """
    first, second, third = rows
    done = _step(layer, [first[:-2], second[:-2]], [1, 2], [False, False])
    middle = _step(layer, [first[-2:-1], second[-2:-1], third], slots, [True, True, False])
    last = _step(layer, [first[-1:], second[-1:]], slots[:2], [True, True])
    return [*(torch.cat(parts) for parts in zip(done, middle[:2], last, strict=True)), middle[2]]


@torch.no_grad()
def test_steps_of_several_sequences_are_the_library_of_each_alone(layer: Any) -> None:
    """Whatever slots held before. Control: sequences that go on from each other's states are others."""
    rows = [torch.randn(length, SIZES["hidden_size"]) for length in LENGTHS]
    expected = [layer(row[None])[0] for row in rows]
    for got, row in zip(_generated(layer, rows, [1, 2, 0]), expected, strict=True):
        torch.testing.assert_close(got, row, rtol=1e-4, atol=1e-4)
    exchanged = _generated(layer, rows, [2, 1, 0])
    for got, row in zip(exchanged[:2], expected[:2], strict=True):
        assert (got[-2:] - row[-2:]).abs().max() > 1e-2
    torch.testing.assert_close(exchanged[2], expected[2], rtol=1e-4, atol=1e-4)


def test_the_step_is_what_vllms_operator_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM registers is looked up by this name, with these parameters. Control: its own insists on bfloat16."""
    import inspect

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    own: Any = gdn_attention.cpu_gdn_attention_core
    monkeypatch.setattr(gdn_attention, "cpu_gdn_attention_core", own)  # put back after this test
    source = inspect.getsource(gdn_attention.register_cpu_gdn_attention_ops)
    assert "op_func=cpu_gdn_attention_core" in source and "requires BF16" in inspect.getsource(own)
    write_delta_nets_out()
    assert gdn_attention.cpu_gdn_attention_core is compute_step
    assert list(inspect.signature(compute_step).parameters) == list(inspect.signature(own).parameters)
