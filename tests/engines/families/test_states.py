"""Sizes of layers that carry a state: as the library makes them, and as vLLM lays its cache out for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.benchmarks.workload.families import write_family
from penstock.engines.families.shape import read_settings, read_shape, shape_of_weights, weight_shapes
from penstock.engines.families.states import BLOCK, MambaSizes, cache_bytes

SIZES = MambaSizes(layers=9, heads=8, head=32, size=16, groups=1, taps=4, chunk=8)


@pytest.mark.parametrize(
    ("name", "attention", "state", "channels"),
    [
        ("Granite 4 (Mamba 2)", 1, 8 * 32 * 16, 256 + 2 * 16),
        ("Falcon-H1", 2, 8 * 32 * 16, 256 + 4 * 16),  # beside attention in each layer
        ("Nemotron-H", 1, 8 * 32 * 16, 256 + 4 * 16),
        ("LFM2", 1, 0, 128),
        ("Qwen 3.5", 1, 4 * 32 * 32, 4 * 64),
    ],
)
def test_sizes_are_those_of_the_layers(name: str, attention: int, state: int, channels: int, tmp_path: Path) -> None:
    """In the words of each family. Control: a model without such layers."""
    shape = read_shape(write_family(name, tmp_path / "model"))
    assert shape.states is not None and shape.attention_layers == attention
    assert (shape.states.state, shape.states.channels) == (state, channels)
    assert read_shape(write_family("Qwen 3", tmp_path / "other")).states is None


def test_the_family_says_which_of_two_such_layers_a_model_has(tmp_path: Path) -> None:
    """Not the names of its settings: here Mamba 2 beside one of gated delta nets'. Control: delta nets themselves."""
    mamba, delta = (write_family(name, tmp_path / name) for name in ("Granite 4 (Mamba 2)", "Qwen 3.5"))
    strange = read_settings(mamba) | {"linear_num_key_heads": 2}
    assert shape_of_weights(strange, weight_shapes(mamba)).mamba == read_shape(mamba).mamba is not None
    assert read_shape(delta).mamba is None and read_shape(delta).delta is not None


@pytest.mark.parametrize("attention", [3, 7])
def test_the_cache_has_room_for_what_it_is_made_for(attention: int) -> None:
    """As vLLM groups layers: as many layers with states as with keys, or a multiple. Control: a sequence fewer."""
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    length, sequences, per_token = 100, 5, 2 * 2 * 32 * 2
    shapes = (SIZES.taps - 1, SIZES.channels), (SIZES.heads, SIZES.head, SIZES.size)
    state = MambaSpec(block_size=length, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
    block = BLOCK * -(-state.page_size_bytes // (BLOCK * per_token))
    keys = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    assert keys.page_size_bytes == block * per_token >= state.page_size_bytes
    padded = MambaSpec(block_size=length, shapes=shapes, dtypes=state.dtypes, page_size_padded=keys.page_size_bytes)
    layers = {f"keys.{number}": keys for number in range(attention)}
    layers |= {f"states.{number}": padded for number in range(SIZES.layers)}
    groups = _get_kv_cache_groups_uniform_page_size(layers)
    blocks = sum(1 if group.kv_cache_spec == padded else -(-length // block) for group in groups)
    page = max(len(group.layer_names) for group in groups) * keys.page_size_bytes
    room = cache_bytes(SIZES, attention, per_token, 2, length, sequences)
    assert room == page * (sequences * blocks + 1)
    assert cache_bytes(SIZES, attention, per_token, 2, length, sequences - 1) < page * sequences * blocks
