"""Models that vLLM would not serve with the trained weights are refused before any engine starts, and no others.

Folders are tiny and real: what is looked at is a configuration and headers of weights as the library writes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.checks.training import check_inputs
from penstock.configs.schema import TrainConfig
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.families.architecture import REMEDY
from penstock.engines.families.served import check_served, native_architectures

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def _write(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    config = getattr(transformers, family)(**{**SIZES, **settings})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder


def _training(model: Path, **sections: Any) -> TrainConfig:
    folder = model.parent
    (folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', encoding="utf-8")
    data = {"train": str(folder / "rows.jsonl"), "heldout": str(folder / "rows.jsonl"), "prompt": "question"}
    data |= sections.pop("data", {})
    return TrainConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": data,
            "reward": {"function": "penstock.rewards.builtin:exact_match"},
            "evaluate": {"prompts": 1},
            "rollout": {"prompts": 1, "samples": 2, "max_response_tokens": 8},
            **sections,
        }
    )


@pytest.mark.parametrize("family", ["PhimoeConfig", "Ernie4_5_MoeConfig"])
def test_mixtures_of_experts_are_refused_before_the_engines_start(family: str, tmp_path: Path) -> None:
    """By their configuration, and by the names of their weights where that says nothing."""
    config = _training(_write(tmp_path / "model", family, EXPERTS))
    with pytest.raises(UserError, match=r"model\.path: .* is a mixture of experts \('num_\w*experts' is 4\)"):
        check_inputs(config)
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({name: settings[name] for name in settings if "expert" not in name}), encoding="utf-8")
    with pytest.raises(UserError, match=r"is a mixture of experts \(it has 'model\.layers\.\d\..*(experts|moe)"):
        check_inputs(config)


@pytest.mark.parametrize("family", ["Olmo2Config", "SmolLM3Config", "Starcoder2Config"])
def test_families_that_vllm_serves_through_another_library_are_taken(family: str, tmp_path: Path) -> None:
    """Its reshard is tests/engines/families/test_every_family.py's. Control: vLLM has no class of its own for them."""
    model = _write(tmp_path / "model", family, {})
    check_inputs(_training(model))
    assert f"{family.removesuffix('Config')}ForCausalLM" not in native_architectures()


def test_rows_that_the_model_would_compute_otherwise_are_refused_before_the_engines_start(tmp_path: Path) -> None:
    """Of prompts and responses that may be longer. Control: shorter ones are taken."""
    factors = {"long_factor": [4.0] * 16, "short_factor": [1.0] * 16, "rope_theta": 1e4, "rope_type": "longrope"}
    settings = {"hidden_size": 128, "rope_parameters": factors, "original_max_position_embeddings": 20}
    model = _write(tmp_path / "model", "Phi3Config", settings)
    with pytest.raises(UserError, match="a prompt of 13 tokens and a response of 8 have 21, and beyond 20 it has"):
        check_inputs(_training(model, data={"max_prompt_tokens": 13}))
    check_inputs(_training(model, data={"max_prompt_tokens": 12}))


@pytest.mark.parametrize(
    "family", ["GraniteMoeConfig", "MixtralConfig", "OlmoeConfig", "Qwen2MoeConfig", "Qwen3MoeConfig"]
)
def test_mixtures_whose_row_says_how_vllm_calls_experts_are_taken(family: str, tmp_path: Path) -> None:
    check_inputs(_training(_write(tmp_path / "model", family, EXPERTS)))


def test_a_critic_needs_no_vllm(tmp_path: Path) -> None:
    """It never generates, so experts and other families are no matter there."""
    for family, settings in (("Olmo2Config", {}), ("GraniteMoeConfig", EXPERTS)):
        actor, critic = (
            _write(tmp_path / family / name, *of)
            for name, of in (("actor", ("LlamaConfig", {})), ("critic", (family, settings)))
        )
        check_inputs(_training(actor, algorithm={"name": "ppo"}, critic={"path": str(critic)}))


@pytest.mark.parametrize(("family", "architecture"), [("Llama", "Llama"), ("Qwen3", "Qwen3"), ("Gemma 3", "Gemma3")])
def test_the_families_that_the_refusal_recommends_are_served(family: str, architecture: str) -> None:
    """The text once recommended one that is refused."""
    assert family in REMEDY
    check_served({"architectures": [f"{architecture}ForCausalLM"]}, [], "it")


def test_a_count_of_no_experts_is_a_dense_model() -> None:
    """Some dense families carry the setting all the same."""
    settings = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0, "num_experts": None}
    check_served(settings, ["model.layers.0.shared_mlp.input_linear.weight"], "it")


def test_the_table_is_vllms_own() -> None:
    """What is read from its file is what it serves by itself. Control: what it also lists is served by another."""
    from vllm import ModelRegistry

    assert native_architectures() <= ModelRegistry.get_supported_archs()
    assert "Olmo2ForCausalLM" in ModelRegistry.get_supported_archs() - native_architectures()
    modules = {name: ModelRegistry.models[name].module_name for name in native_architectures()}
    assert [name for name, module in modules.items() if module.endswith(".transformers")] == []


def test_the_table_is_read_without_vllm_or_torch() -> None:
    """The check belongs to the flow's process, which imports neither."""
    table = "import sys, penstock.engines.families.served as s; s.native_architectures()"
    code = f"{table}; print({{'vllm', 'torch'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
