"""The FLOPs that metrics count are those of PyTorch's own counter on the same mathematics, to the last one.

The oracle runs the library's model on one row at a time, token after token with a cache: then every query meets just
the tokens that it sees, and the head sees just the positions that predict a response. The formulas share nothing
with it but the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.benchmarks.workload.families import write_family
from penstock.engines.families.shape import ModelShape, read_shape
from penstock.engines.sizing.flops import (
    attention_flops,
    forward_flops,
    fp8_flops,
    generation_flops,
    peak_flops,
    training_flops,
)
from tests.engines.shared_ranks import Shape

PROMPTS, RESPONSES = np.array([3, 3, 6, 6]), np.array([1, 4, 2, 5])
SHAPES = [Shape("qwen2", tied=True), Shape("llama", tied=False), Shape("qwen2", tied=True, sliding_window=True)]
FolderOf = Callable[[Shape], Path]


@contextmanager
def _counted(result: list[float]) -> Iterator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    result.append(float(counter.get_total_flops()))


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def _one_by_one(lm: Any, head: nn.Module, prompt: int, response: int) -> torch.Tensor:
    """Run a row token by token; the sum of the head's outputs at the positions that predict the response.

    The hidden states are in the sum, too: packed rows go backward as a whole, with zeros where a prompt is.
    """
    cache, outputs = DynamicCache(config=lm.config), []
    for position in range(prompt + response):
        token = torch.full((1, 1), 5)
        hidden = lm.model(token, past_key_values=cache, use_cache=True).last_hidden_state[0]
        outputs.append(hidden.sum())
        if prompt - 1 <= position < prompt + response - 1:
            outputs.append(head(hidden).sum())
    return torch.stack(outputs).sum()


@pytest.mark.parametrize("shape", SHAPES, ids=["qwen2", "llama", "window"])
def test_forward_and_backward_flops_are_the_counters(shape: Shape, folder_of: FolderOf) -> None:
    """Of an actor and of a critic, with grouped heads and with a sliding window of 4 tokens."""
    folder = folder_of(shape)
    lm, sizes = _load(folder), read_shape(folder)
    assert sizes.explained
    assert (sizes.window, sizes.windowed_layers) == ((4, 2) if shape.sliding_window else (0, 0))
    prompts, responses = PROMPTS[1:3], RESPONSES[1:3]  # the counter is slow
    for head, scalar in ((lm.lm_head, False), (nn.Linear(sizes.hidden_size, 1), True)):
        forward: list[float] = []
        both: list[float] = []
        for prompt, response in zip(prompts.tolist(), responses.tolist(), strict=True):
            with FlopCounterMode(display=False) as counter:
                result = _one_by_one(lm, head, prompt, response)
                forward.append(float(counter.get_total_flops()))
                result.backward()
                both.append(float(counter.get_total_flops()))
        assert forward_flops(sizes, prompts, responses, scalar_head=scalar) == sum(forward)
        assert training_flops(sizes, prompts, responses, scalar_head=scalar) == sum(both)


@torch.no_grad()
def test_generation_reads_a_prompt_once_and_never_the_last_token(folder_of: FolderOf) -> None:
    """Two samples per prompt: the second continues from the first one's prompt."""
    folder = folder_of(SHAPES[0])
    lm, counts = _load(folder), []
    for row, (prompt, response) in enumerate(zip(PROMPTS.tolist(), RESPONSES.tolist(), strict=True)):
        cache = DynamicCache(config=lm.config)
        for position in range(prompt + response - 1):
            shared = position < prompt and row % 2 == 1
            with _counted([] if shared else counts):
                hidden = lm.model(torch.full((1, 1), 5), past_key_values=cache, use_cache=True).last_hidden_state[0]
            if position >= prompt - 1:
                with _counted(counts):
                    lm.lm_head(hidden)
    assert generation_flops(read_shape(folder), PROMPTS, RESPONSES, samples=2) == sum(counts)


def test_what_rows_share_is_counted_once(folder_of: FolderOf) -> None:
    """As above: what the second row's shared tokens cost, less; beyond its prompt the head's part of them as well."""
    sizes = read_shape(folder_of(SHAPES[2]))
    for beyond in (0, 2):
        shared = np.array([0, PROMPTS[1] + beyond, 0, 0])
        counted = {"shared_B": shared, "scalar_head": False}
        apart = forward_flops(sizes, PROMPTS, RESPONSES, scalar_head=False)
        once = forward_flops(sizes, PROMPTS, RESPONSES, **counted)
        spared = forward_flops(sizes, PROMPTS[1:2], np.array([beyond]), scalar_head=False)
        assert apart - once == spared > 0
        assert training_flops(sizes, PROMPTS, RESPONSES, **counted) == 3 * once


def test_flops_in_fp8_are_those_of_the_blocks_linear_layers(folder_of: FolderOf) -> None:
    """All but attention's pairs and the head; two thirds of them in training: weights' gradients stay bfloat16."""
    sizes, none = read_shape(folder_of(SHAPES[0])), np.zeros_like(PROMPTS)
    shared = np.array([0, PROMPTS[1], 0, 0])
    one = fp8_flops(sizes, PROMPTS, RESPONSES, shared_B=shared, passes=1)
    pairs = attention_flops(sizes, PROMPTS + RESPONSES) - attention_flops(sizes, shared)
    head = 2.0 * sizes.hidden_size * sizes.vocabulary * float(RESPONSES.sum())
    assert one + pairs + head == forward_flops(sizes, PROMPTS, RESPONSES, scalar_head=False, shared_B=shared)
    both = fp8_flops(sizes, PROMPTS, RESPONSES, shared_B=shared, passes=2)
    assert both + one + 3 * (pairs + head) == training_flops(
        sizes, PROMPTS, RESPONSES, scalar_head=False, shared_B=shared
    )
    assert fp8_flops(sizes, PROMPTS, none, shared_B=none, passes=1) < one


def test_attention_follows_each_sequences_own_length() -> None:
    """Control for packing: the same tokens in one sequence cost more, by the pairs that would cross."""
    sizes = ModelShape(0, 1, 8, 8, heads=2, kv_heads=1, head_size=4, vocabulary=16, positions=99)
    no_prompt = np.zeros(1)
    apart = forward_flops(sizes, np.zeros(2), np.array([10, 10]), scalar_head=False)
    joined = forward_flops(sizes, no_prompt, np.array([20]), scalar_head=False)
    assert joined - apart == 4 * 2 * 4 * 10 * 10


MIXTURES = ["Mixtral", "OLMoE", "Qwen 2 MoE", "Qwen 3 MoE", "Qwen 3 Next", "Command A+", "Granite MoE"]
DENSE_FIRST = ["GLM-4.5", "EXAONE MoE"]


@pytest.mark.parametrize("family", [*MIXTURES, *DENSE_FIRST])
def test_a_token_meets_the_experts_that_are_chosen_for_it(family: str, tmp_path: Path) -> None:
    """By the matrices that the library has. Control: what is stored is more."""
    write_family(family, tmp_path)
    sizes, experts = read_shape(tmp_path), read_shape(tmp_path).experts
    assert sizes.explained and experts is not None and experts.chosen < experts.count
    assert sizes.dense_layers == (family in DENSE_FIRST)
    layers = _load(tmp_path).model.layers
    matrices = {name: matrix.numel() for name, matrix in layers.named_parameters() if matrix.dim() > 1}
    of_experts = sum(count for name, count in matrices.items() if ".experts." in name)
    others = sum(matrices.values()) - of_experts
    assert sizes.matrices_per_token == others + of_experts * experts.chosen // experts.count
    assert sizes.block_matrices == others + of_experts > sizes.matrices_per_token


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "apart", "channels", "taps"),
    [  # FLOPs of recurrences that the library computes without products, numbers that its convolution sees, and tokens
        ("Qwen 3.5", 4 * 3 * 2 * 32 * 32, 256, 4),  # four states of 32 x 32, three products of a vector with each
        ("Granite 4 (Mamba 2)", 8 * 2 * 32 * 16, 288, 4),  # eight states of 32 x 16; it reads them by a product
        ("Nemotron-H", 8 * 2 * 32 * 16, 320, 4),
        ("Falcon-H1", 2 * 8 * 2 * 32 * 16, 2 * 320, 4),  # two layers
        ("LFM2", 0, 2 * 128, 3),  # two layers
    ],
)
def test_layers_with_a_state_are_counted_by_their_recurrence(
    family: str, apart: int, channels: int, taps: int, tmp_path: Path
) -> None:
    """All else of a token after the first as PyTorch counts it. Control: without states it is another number."""
    write_family(family, tmp_path)
    sizes, lm, counted = read_shape(tmp_path), _load(tmp_path), list[float]()
    assert sizes.explained and sizes.states is not None
    cache = DynamicCache(config=lm.config)
    for _ in range(2):
        with _counted(counted):
            lm.model(torch.full((1, 1), 5), past_key_values=cache, use_cache=True)
    one, none = np.array([1]), np.array([0])

    def second(shape: ModelShape) -> float:
        return forward_flops(shape, 2 * one, none, scalar_head=True, shared_B=one)

    in_vain = 2 * channels * taps  # of the convolution: what it has for the token before
    assert second(sizes) - apart + in_vain == counted[1]
    assert second(replace(sizes, delta=None, mamba=None, convolution=None)) != second(sizes)


def test_a_model_whose_sizes_do_not_explain_its_parameters_is_told(folder_of: FolderOf) -> None:
    """Experts of which no row knows: the formulas would credit what is never computed."""
    sizes = read_shape(folder_of(SHAPES[1]))
    experts = ModelShape(**{**vars(sizes), "parameters": sizes.parameters + 3 * sizes.layers * 128 * 96})
    assert sizes.explained
    assert not experts.explained


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA A40-48Q", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_are_the_named_gpus_own(name: str, teraflops: float | None) -> None:
    """A wrong peak would be a wrong MFU in every run; none is better."""
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(name, "bfloat16") == expected
    assert peak_flops(name, "float32") is None
