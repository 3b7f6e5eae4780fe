"""Families of models: what packed training runs as the library does is accepted, and the others are refused by name.

The oracle is `tests.engines.unpacked`. Every model is tiny and random, with weights so large that each of them shows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model.folder import check_model_folder
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.families.images import of_decoder
from penstock.engines.families.table import family_of
from penstock.engines.kernels import attention_kernel
from penstock.engines.kernels.attention import packed_attention
from penstock.engines.models.loading import load_causal_lm, start_reward_model
from penstock.engines.models.models import PackedPolicy, PackedRewardModel, language_head
from tests.engines.rows import random_rows
from tests.engines.shared_ranks import EOS, PAD, VOCABULARY
from tests.engines.unpacked import load_unpacked, row_logprobs

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 20}
LONG = {**ROPE, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "rope_type": "longrope"}
BY_TURNS = ["sliding_attention", "full_attention"]
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the rotary part
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GOOD: dict[str, dict[str, Any]] = {
    "Gemma3TextConfig": {**HEADS, "sliding_window": 4, "layer_types": BY_TURNS},
    "Gemma2Config": {**HEADS, "sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    "VaultGemmaConfig": {**HEADS, "sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    "GraniteConfig": {
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
    },
    "CohereConfig": {"logit_scale": 0.0625, "use_qk_norm": True},
    "Cohere2Config": {
        "logit_scale": 0.25,
        "sliding_window": 40,
        "layer_types": BY_TURNS,
    },
    "LlamaConfig": {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}},
    "PhiConfig": {"num_key_value_heads": 4},
    "Phi3Config": {"rope_parameters": LONG, "original_max_position_embeddings": 40},
    "Olmo3Config": {"sliding_window": 4, "layer_types": BY_TURNS},
    "Exaone4Config": {"sliding_window": 4},
    "GptOssConfig": {**HEADS, **EXPERTS, "sliding_window": 4},
    "DeepseekV3Config": LATENT,
    **dict.fromkeys(
        (
            *("MistralConfig", "Ministral3Config", "OlmoConfig", "Olmo2Config", "SmolLM3Config"),
            *("Starcoder2Config", "SeedOssConfig", "ArceeConfig", "Ernie4_5Config"),
        ),
        {},
    ),
    **dict.fromkeys(("GlmConfig", "Glm4Config", "HeliumConfig", "MinistralConfig", "HunYuanDenseV1Config"), HEADS),
}
LOUD = {"Gemma2Config", "VaultGemmaConfig", "GptOssConfig"}  # the library's own kernel leaves out caps, and sinks
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "JambaConfig": ({}, "has layers of Mamba 1"),
    "Mamba2Config": ({"num_heads": 8, "head_dim": 8}, "carries a state from token to token"),
    "Qwen3Config": ({**HEADS, "final_logit_softcapping": 30.0}, "sets 'final_logit_softcapping'"),
    "MistralConfig": ({"attn_logit_softcapping": 30.0}, "sets 'attn_logit_softcapping'"),
    "OPTConfig": ({"logit_scale": 0.5}, "sets 'logit_scale'"),
    "MiniCPM3Config": (LATENT, "multi-head latent attention"),
    "Qwen2Config": ({"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}, "of the type 'dynamic'"),
}


def write_model(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    config = getattr(transformers, family)(**{**SIZES, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in lm.named_parameters():
            if parameter.dim() > 1 or name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.2)
    lm.save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", GOOD)
@torch.no_grad()
def test_accepted_families_give_the_log_probs_of_each_row_alone(family: str, tmp_path: Path) -> None:
    """Both checks accept them, and company in a micro-batch changes nothing."""
    folder, rows = write_model(tmp_path, family, GOOD[family]), random_rows(5, samples=2)
    check_model_folder(folder, "model.path")
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, False)).eval()
    oracle = load_unpacked(folder, attention="eager" if family in LOUD else "sdpa")
    logprobs_T, _ = policy(pack(rows, list(range(len(rows))), torch.device("cpu")), 1.0)
    expected_T = torch.cat([row_logprobs(oracle, rows, row)[0] for row in range(len(rows))])
    torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", BAD)
def test_families_that_would_train_on_wrong_log_probs_are_refused_before_and_when_loaded(
    family: str, tmp_path: Path
) -> None:
    """From configuration and headers alone, and from the model; the message says what it is."""
    settings, message = BAD[family]
    folder = write_model(tmp_path, family, settings)
    with pytest.raises(UserError, match=rf"model\.path: .*{message}"):
        check_model_folder(folder, "model.path")
    with pytest.raises(UserError, match=message):
        load_causal_lm(folder, torch.float32, False)


def test_what_happens_to_logits_is_no_matter_where_the_head_is_not_used(tmp_path: Path) -> None:
    """A reward model has a score in its place. Control: scores that are changed are refused all the same."""
    folder = write_model(tmp_path, "Qwen3Config", {**HEADS, "final_logit_softcapping": 30.0})
    check_model_folder(folder, "model.path", scores=True)
    model = PackedRewardModel(start_reward_model(folder, torch.float32, False)).eval()
    with torch.no_grad():
        torch.nn.init.normal_(model.classifier.score.weight)
        rows = random_rows(3)
        together_B = model(pack(rows, [0, 1, 2], torch.device("cpu")))
        alone_B = torch.cat([model(pack(rows, [row], torch.device("cpu"))) for row in range(3)])
    torch.testing.assert_close(together_B, alone_B)
    capped = write_model(tmp_path / "capped", "MistralConfig", {"attn_logit_softcapping": 30.0})
    with pytest.raises(UserError, match="attn_logit_softcapping"):
        check_model_folder(capped, "model.path", scores=True)


def test_what_only_the_models_class_says_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Bloom adds its position biases itself and never asks for the attention that was registered."""
    sizes = {"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": VOCABULARY}
    folder = write_model(tmp_path, "BloomConfig", sizes)
    with pytest.raises(UserError, match="an attention of its own"):
        load_causal_lm(folder, torch.float32, False)


@pytest.mark.parametrize("name", ["GLM-4.5", "Trinity", "MiniMax M2"])
def test_what_corrects_a_choice_of_experts_is_read_exactly(name: str, tmp_path: Path) -> None:
    """The library itself would round some families'. Control: other weights are rounded."""
    folder = write_family(name, tmp_path / "model")
    given, lm = load_file(folder / "model.safetensors"), load_causal_lm(folder, torch.bfloat16, False)
    family = family_of(lm.config.model_type)
    held = {part: value for part, value in lm.named_parameters() if part.endswith(family.corrections)}
    assert held and all(value.dtype is torch.float32 and not value.requires_grad for value in held.values())
    biases = sorted(value.tolist() for part, value in given.items() if part.endswith(family.corrections))
    assert sorted(value.tolist() for value in held.values()) == biases
    assert language_head(lm).weight.dtype is torch.bfloat16


@torch.no_grad()
def test_what_only_the_forward_pass_shows_is_refused_in_words(tmp_path: Path) -> None:
    """Nemotron's layers hand nothing on to their attention: it cannot know where the sequences lie."""
    folder, rows = write_model(tmp_path, "NemotronConfig", {}), random_rows(2)
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, False)).eval()
    with pytest.raises(UserError, match="does not tell its attention where sequences lie"):
        policy(pack(rows, [0, 1], torch.device("cpu")), 1.0)


@pytest.mark.parametrize(
    ("family", "settings", "beyond"),
    [
        ("Phi3Config", {"rope_parameters": LONG, "original_max_position_embeddings": 20}, "LongRoPE"),
        ("Cohere2Config", {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2}, "one token longer"),
    ],
)
@torch.no_grad()
def test_a_row_beyond_which_others_would_change_is_refused(
    family: str, settings: dict[str, Any], beyond: str, tmp_path: Path
) -> None:
    """Control: rows that are as long as they may be, of the same model, are computed."""
    folder = write_model(tmp_path, family, settings)
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, False)).eval()
    ten = Ragged.of([np.full(10, 5)], np.int32)
    rows = Rows(ten, ten, Ragged.of([np.ones(10)], np.uint8), {})
    policy(pack(rows, [0], torch.device("cpu")), 1.0)
    longer = replace(rows, prompts=Ragged.of([np.full(11, 5)], np.int32))
    with pytest.raises(UserError, match=f"a row has 21 tokens, and beyond 20 .*{beyond}"):
        policy(pack(longer, [0], torch.device("cpu")), 1.0)


def test_an_unknown_layer_type_is_refused_whatever_it_is_called(tmp_path: Path) -> None:
    """Only full and windowed attention are known. Control: the same folder without the entry passes."""
    folder = write_model(tmp_path, "Olmo2Config", {})
    check_model_folder(folder, "model.path")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = config | {"layer_types": ["full_attention", "chunked_attention"]}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(UserError, match="'chunked_attention'"):
        check_model_folder(folder, "model.path")


@pytest.mark.parametrize(
    "entry",
    [
        {"rope_scaling": {"type": "dynamic"}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}},
    ],
)
def test_positions_by_length_are_refused_however_the_file_says_it(entry: dict[str, Any], tmp_path: Path) -> None:
    """Old names, and a type for each type of layers. Control: the same folder without the entry passes."""
    folder = write_model(tmp_path, "Olmo2Config", {})
    check_model_folder(folder, "model.path")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | entry), encoding="utf-8")
    with pytest.raises(UserError, match="positions of the type 'dynamic'"):
        check_model_folder(folder, "model.path")


def test_the_attention_itself_refuses_what_it_would_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model is called: nothing that changes the scores is passed over in silence.

    Control: rows side by side, which have both.
    """
    monkeypatch.setattr(attention_kernel, "_chosen", ["flash_attention_2"])
    batch = pack(random_rows(3), [0, 1, 2], torch.device("cpu"))
    heads = torch.ones(1, 4, len(batch.tokens_N), 8)
    packed_attention(torch.nn.Identity(), heads, heads, heads, None, packing=batch.layout, s_aux=None, softcap=None)
    on_a_gpu = replace(batch.layout, slots_K=None)
    for message, value, others in (
        ("attention sinks", heads, {"s_aux": torch.zeros(4)}),
        ("values of another size", heads[..., :6], {}),
    ):
        packed_attention(torch.nn.Identity(), heads, heads, value, None, packing=batch.layout, **others)
        with pytest.raises(UserError, match=f"{message}.*no kernel"):
            packed_attention(torch.nn.Identity(), heads, heads, value, None, packing=on_a_gpu, **others)


def test_sinks_have_the_gradient_of_a_softmax_with_one_score_more(tmp_path: Path) -> None:
    """Of each head, as the library has it of each row alone. Control: the gradient of sinks elsewhere is another."""
    folder, rows = write_model(tmp_path, "GptOssConfig", GOOD["GptOssConfig"]), random_rows(5)
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, False)).eval()
    oracle = load_unpacked(folder, attention="eager")

    def gradients(model: Any, logprobs_T: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        logprobs_T.sum().backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if name.endswith("sinks")}

    ours = gradients(policy.lm, policy(pack(rows, [0, 1, 2, 3, 4], torch.device("cpu")), 1.0)[0])
    theirs = gradients(oracle, torch.cat([row_logprobs(oracle, rows, row)[0] for row in range(len(rows))]))
    assert len(ours) == 2 and all(value.abs().min() > 1e-4 for value in ours.values())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        policy.lm.get_parameter("model.layers.0.self_attn.sinks").add_(1.0)
    moved = gradients(policy.lm, policy(pack(rows, [0, 1, 2, 3, 4], torch.device("cpu")), 1.0)[0])
    assert all((moved[name] - value).abs().max() > 1e-3 for name, value in ours.items())


@pytest.mark.parametrize("family", ["GptOssConfig", "DeepseekV3Config", "Gemma2Config"])
def test_what_flex_attention_alone_computes_is_no_obstacle_where_there_is_a_gpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: what else a folder may lack is looked at there, too."""
    monkeypatch.setattr("penstock.checks.model.folder.visible_gpus", lambda: ["0"])
    folder = write_model(tmp_path, family, GOOD[family])
    check_model_folder(folder, "model.path")
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        check_model_folder(folder, "model.path")


def test_quantised_weights_are_refused_by_their_kind(tmp_path: Path) -> None:
    """As gpt-oss comes from the Hub. Control: without the entry the same folder passes."""
    folder = write_model(tmp_path, "GptOssConfig", GOOD["GptOssConfig"])
    check_model_folder(folder, "model.path")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"quantised weights \(mxfp4"):
        check_model_folder(folder, "model.path")


def test_settings_of_a_decoder_stand_inside_or_beside_the_others() -> None:
    """As the library writes them, and as files on the Hub have them. Control: a model of text is left as it is."""
    nested = {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", "hidden_size": 8}}
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 8, "vision_config": {"hidden_size": 32}}
    for settings in (nested, flat):
        decoder = of_decoder(settings)
        assert (decoder["model_type"], decoder["hidden_size"]) == ("qwen2_5_vl", 8)
    text = {"model_type": "qwen2", "hidden_size": 8}
    assert of_decoder(text) is text
