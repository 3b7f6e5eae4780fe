"""Tiny models with random weights, one for each family that is trained or known to be refused.

Every size is small and every setting that changes what is computed is far from where it does nothing: windows are
shorter than rows, caps are reached. Left out: what is measured of them (penstock/benchmarks/families/measuring.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM serves on a CPU
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so wide that every wrong weight shows in log-probs
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
BY_TURNS = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = {"sliding_window": 8, **BY_TURNS}
CAPPED = {**WINDOWED, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}
SCALED = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [4.0] * 16,
    "short_factor": [1.0 + 0.1 * number for number in range(16)],
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ONE_SHARED = {"num_shared_experts": 1, "n_group": 1, "topk_group": 1}
GROUPED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT = {
    "head_dim": 16,  # of the rotary part, as the library has it
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
SCALED_ROPE = {  # whose scores are scaled by the square of a factor, too
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
}
CORRECTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}  # as on the Hub
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,  # shorter than rows
}
NO_EXPERTS = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["linear_attention", "full_attention"],
}
MULTIPLIED = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3],
    "mlp_multipliers": [0.7, 1.4],
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "attention", "mlp"],
}
SHORT_CONVOLUTIONS = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
    "conv_dim": 128,  # the sizes that vLLM reads, as files on the Hub have them
    "block_dim": 128,
    "block_auto_adjust_ff_dim": False,
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "StableLM": ("stablelm", {}),
    "Nemotron": ("nemotron", {}),
    "Apertus": ("apertus", {}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "Jamba": ("jamba", {**EXPERTS, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "Bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "Mamba 2": ("mamba2", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1}),
}
SPECIAL = {"image": 60, "video": 61, "vision_start": 62, "vision_end": 63}  # tokens of models that see
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
ENCODER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": 14,
    "initializer_range": 0.1,
}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # model type: settings of the decoder, of the encoder
    "qwen2_5_vl": ({"rope_parameters": ROTARY}, {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        {"rope_parameters": {**ROTARY, "mrope_interleaved": True}},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {}),
    "Ministral": ("ministral", {}),
    "Ministral 3": ("ministral3", {}),
    "Qwen 2": ("qwen2", {}),
    "Qwen 3": ("qwen3", {}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", CAPPED),
    "Gemma 3": ("gemma3_text", {**WINDOWED, "query_pre_attn_scalar": 32}),
    "VaultGemma": ("vaultgemma", CAPPED),
    "Phi-2": ("phi", {"num_key_value_heads": 4}),
    "GPT-NeoX": ("gpt_neox", {"num_key_value_heads": 4}),
    "Persimmon": ("persimmon", {"num_key_value_heads": 4}),
    "Phi-3": ("phi3", {}),
    "Phi-4-mini (LongRoPE)": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "Command R": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "Command R7B": ("cohere2", {"logit_scale": 0.25, "sliding_window": 64, **BY_TURNS}),
    "Granite": ("granite", SCALED),
    "GLM-4 (9B)": ("glm", {}),
    "GLM-4 (0414)": ("glm4", {}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", WINDOWED),
    "SmolLM 3": ("smollm3", {}),
    "StarCoder 2": ("starcoder2", {}),
    "Seed-OSS": ("seed_oss", {}),
    "Arcee": ("arcee", {}),
    "HunYuan": ("hunyuan_v1_dense", {}),
    "EXAONE 4": ("exaone4", {"sliding_window": 8}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Helium": ("helium", {}),
    "Mixtral": ("mixtral", EXPERTS),
    "Qwen 2 MoE": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen 3 MoE": ("qwen3_moe", EXPERTS),
    "OLMoE": ("olmoe", EXPERTS),
    "GLM-4.5": ("glm4_moe", GROUPED),
    "EXAONE MoE": ("exaone_moe", {**EXPERTS, **ONE_SHARED, "first_k_dense_replace": 1}),
    "Trinity": (
        "afmoe",
        {**EXPERTS, **ONE_SHARED, "num_dense_layers": 1, "score_func": "sigmoid", "route_norm": True},
    ),
    "Command A+": ("cohere2_moe", {**EXPERTS, "logit_scale": 0.25, "sliding_window": 64, **BY_TURNS}),
    "Granite MoE": ("granitemoe", {**EXPERTS, **SCALED}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "sliding_window": 8}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {**LATENT, **SCALED_ROPE, **GROUPED, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    ),
    "DeepSeek-V3": ("deepseek_v3", {**LATENT, **SCALED_ROPE, **GROUPED, **CORRECTED}),
    "Moonlight": (
        "deepseek_v3",
        {**LATENT, **GROUPED, **CORRECTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "MiniMax M2": (
        "minimax_m2",
        {**EXPERTS, "rotary_dim": 16, "use_routing_bias": True, "scoring_func": "sigmoid"},
    ),
    "GLM-4.7 Flash": ("glm4_moe_lite", {**LATENT, **GROUPED, **CORRECTED}),
    "Qwen 2.5 VL": ("qwen2_5_vl", {}),
    "Qwen 3 VL": ("qwen3_vl", {}),
    "Granite 4 (Mamba 2)": ("granitemoehybrid", {**SCALED, **MAMBA, **NO_EXPERTS}),
    "Falcon-H1": (
        "falcon_h1",
        {
            **MAMBA,
            **MULTIPLIED,
            "mamba_d_ssm": 256,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "Nemotron-H": ("nemotron_h", NEMOTRON),
    "LFM2": ("lfm2", SHORT_CONVOLUTIONS),
    "Qwen 3.5": ("qwen3_5_text", LINEAR),
    "Qwen 3.5 MoE": ("qwen3_5_moe_text", {**EXPERTS, **LINEAR}),
    "Qwen 3 Next": ("qwen3_next", {**EXPERTS, **LINEAR}),
    **REFUSED,
}


def write_family(name: str, folder: Path) -> Path:
    """Write the tiny model of a family with a byte tokenizer beside it; the same weights each time."""
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    from penstock.data.tokenizer import make_byte_tokenizer
    from penstock.engines.models.loading import kind_for
    from penstock.engines.models.tiny import write_image_processor

    model_type, settings = FAMILIES[name]
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = CONFIG_MAPPING[model_type](**_seeing(model_type) or {**SIZES, **settings})
        model = kind_for(config).from_config(config)
        for value_name, value in (*model.named_parameters(), *model.named_buffers()):
            if value_name.endswith("bias"):  # zero at first: a lost bias would not show
                torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(folder)
    make_byte_tokenizer(folder)
    if model_type in SEEING:
        write_image_processor(folder)
    return folder


def _seeing(model_type: str) -> dict[str, Any]:
    """Return the settings of a model that sees; none for one of text."""
    if model_type not in SEEING:
        return {}
    decoder, encoder = SEEING[model_type]
    special = {f"{name}_token_id": token for name, token in SPECIAL.items()}
    return {"text_config": {**SIZES, **decoder}, "vision_config": {**ENCODER, **encoder}, **special}
