"""A model with random weights ends its responses as seldom, or as often, as it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.benchmarks.workload import make_model


@pytest.mark.parametrize(("mean_response", "tokens"), [(None, 1), (100, 1519)])
def test_the_share_of_tokens_that_end_a_response(
    mean_response: int | None, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the weights too: what is drawn at temperature 1 ends a response about once in `mean_response` tokens."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setitem(make_model.SHAPES, "small", small)
    monkeypatch.setitem(make_model.KV_HEADS, "small", 2)
    make_model.main("small", tmp_path, mean_response)
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == len(set(ends)) == tokens
    assert max(ends) == make_model.VOCABULARY - 1

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        probabilities_TV = model(torch.tensor([[5, 90, 7, 200]])).logits[0].softmax(-1)
    share = float(probabilities_TV[:, ends].sum(-1).mean())
    assert share == pytest.approx(tokens / make_model.VOCABULARY, rel=0.5)


def test_a_shape_may_have_fewer_layers_and_a_smaller_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends a response is in it, and so is every token of the tokenizer. Control: the shape itself has four."""
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setitem(make_model.SHAPES, "small", small)
    monkeypatch.setitem(make_model.KV_HEADS, "small", 2)
    made = []
    for name, options in (("whole", {}), ("part", {"layers": 1, "vocabulary": 512})):
        make_model.main("small", tmp_path / name, **options)
        config = json.loads((tmp_path / name / "config.json").read_text())
        generation = json.loads((tmp_path / name / "generation_config.json").read_text())
        tokens = json.loads((tmp_path / name / "tokenizer.json").read_text())["model"]["vocab"]
        made.append((config["num_hidden_layers"], config["vocab_size"], len(tokens), generation["eos_token_id"]))
    assert made == [(4, 151_936, 151_936, [151_935]), (1, 512, 512, [511])]


def test_a_mixture_has_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by its own name, it loads as one; what is smaller here is its sizes. Control: the other shapes have none."""
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 8,
    }
    monkeypatch.setattr(make_model, "EXPERTS", make_model.EXPERTS | small)
    make_model.main(make_model.MIXTURE, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 32
    assert "num_experts" not in make_model.sizes("0.5")
