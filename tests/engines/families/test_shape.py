"""A model's sizes are read from its configuration and the headers of its files, and are the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.benchmarks.workload.families import write_family
from penstock.engines.families.shape import read_settings, read_shape, shape_of_weights, weight_shapes
from penstock.engines.models.loading import load_causal_lm
from tests.engines.shared_ranks import Shape

SHAPES = [Shape("qwen2", tied=True), Shape("llama", tied=False, vocabulary=100)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_the_files_headers_tell_the_models_size(shape: Shape, folder_of: Callable[[Shape], Path]) -> None:
    """No weight is loaded, and the count is the model's own: biases in, tied embeddings once."""
    folder = folder_of(shape)
    read = read_shape(folder)
    lm = load_causal_lm(folder, torch.float32, False)
    assert read.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert read.vocabulary == shape.vocabulary
    assert (read.layers, read.hidden_size, read.intermediate_size) == (2, 128, 96)
    assert (read.kv_heads, read.head_size, read.positions) == (2, 32, 512)
    assert not read.query_key_norms  # as Qwen3 has them


def test_a_model_in_several_files_is_counted_whole(tmp_path: Path, folder_of: Callable[[Shape], Path]) -> None:
    """Large models come in shards: every file counts."""
    folder = folder_of(Shape("qwen3", tied=False))
    lm = load_causal_lm(folder, torch.float32, False)
    lm.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read_shape(tmp_path) == read_shape(folder)


def test_layers_for_several_tokens_at_a_time_are_not_counted(tmp_path: Path) -> None:
    """As files on the Hub have them, by two kinds of names, with experts of their own. Control: others count."""
    folder = write_family("Qwen 3 Next", tmp_path)
    settings, weights = read_settings(folder), weight_shapes(folder)
    another = {name.replace("model.", "mtp."): shape for name, shape in weights.items() if ".layers.1." in name}
    assert any(".experts." in name for name in another)
    shape = read_shape(folder)
    assert shape_of_weights(settings, {**weights, **another}) == shape
    behind = {name.replace("mtp.layers.1", "model.layers.2"): size for name, size in another.items()}
    assert behind.keys().isdisjoint(weights) and shape_of_weights(settings, {**weights, **behind}) == shape
    within = {name.replace("mtp.", "model.more."): size for name, size in another.items()}
    assert shape_of_weights(settings, {**weights, **within}) != shape
