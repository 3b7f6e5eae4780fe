"""The recipes for large models fit the machines that they name, by the estimate that starts or refuses a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.sizes.estimate import CARDS, measure
from penstock.benchmarks.sizes.shapes import shape_named
from penstock.configs.loading.load import load_config
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("recipe", "model", "host_gib"), [("big_32b", "qwen2.5-32b", 1024), ("big_70b", "llama-3.1-70b", 2048)]
)
def test_a_large_recipe_fits_eight_gpus_and_their_host(recipe: str, model: str, host_gib: int) -> None:
    """Every phase on either card. Controls: without the offload it does not fit, and neither on one GPU."""
    path, shape = ROOT / "configs" / f"{recipe}.yaml", shape_named(model)
    found = measure(load_config(path), shape, 8, "")
    assert {row["card"] for row in found.details} == set(CARDS)
    assert all(row["fits"] == "yes" for row in found.details)
    assert 0 < max(found.figures["host_gib"], found.figures["host_load_gib"]) < host_gib
    without = load_config(path, ("actor.offload=nothing", "actor.offload_activations=false"))
    assert "no" in {row["fits"] for row in measure(without, shape, 8, "").details}
    assert measure(without, shape, 8, "").figures["host_gib"] == 0
    with pytest.raises(UserError, match="has several groups"):
        groups = "groups={a: {gpus: [0], roles: [actor]}, b: {gpus: [1], roles: [rollout]}}"
        measure(load_config(path, (groups, "rollout.tensor_parallel=1", "actor.sequence_parallel=1")), shape, 8, "")


def test_a_folder_with_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    """Tied embeddings count once. Controls: sizes of a mixture do not follow from it, and no folder is none."""
    settings = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    assert shape_named(str(tmp_path)).parameters == 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16) + 80 + 5 * 8
    file.write_text(json.dumps(settings | {"model_type": "mixtral"}), encoding="utf-8")
    with pytest.raises(UserError, match="sizes of 'mixtral' do not follow"):
        shape_named(str(tmp_path))
    with pytest.raises(UserError, match="no folder with a config.json"):
        shape_named(str(tmp_path / "absent"))
