"""What differs between families of models, as one table: a family that differs from the usual pattern has a row here.

The usual pattern (`USUAL`) is a decoder as Llama, Mistral, Qwen, Gemma and most others have it in transformers and in
vLLM; a model type without a row is taken for one. So a row is a claim about the libraries' own code, which a test holds
against it (tests/engines/families/test_table.py), and none is needed for a model that only has other sizes.

What training on packed sequences cannot do is told by signs in configurations and in names of weights; the signs are
the family's too, since a name may mean something else elsewhere. Left out: what is checked with them (architecture.py,
served.py), sizes (shape.py). No torch here: the checks before a start read it as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

WINDOWED = "sliding_attention"


@dataclass(frozen=True)
class Linear:
    """A linear layer of vLLM's, and those of transformers whose rows are stacked in it.

    Attributes:
        served: its name in vLLM.
        parts: the names in transformers, in the order of rows; one that is called as `served` may come stacked already.
    """

    served: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One row: what a family does not say of itself is as usual.

    Attributes:
        model_types: `model_type` of its configurations.
        query_key_value, attention_output, gate_up, down: the linear layers of a block.
        attention_gate: of what attention's output is multiplied by, as wide as queries, where a layer makes just that.
        delta_net: those of a gated delta net in its place: queries, keys, values and gates; strength and decay; output.
        head: the language head.
        query_norm: the layer that norms queries, where there is one (and another one of its kind norms keys).
        gated_mlps: classes of its MLPs that compute down(silu(gate(x)) * up(x)) and nothing else: on a Hopper GPU
            penstock/engines/kernels/gated_mlp.py takes their place, and the memory estimate counts on that.
        layer_types: types of layers, as a configuration lists them, that `packed_attention` computes.
        score_settings: settings that change attention's scores after the product of queries and keys, and
            logit_settings: settings that change logits after the language head; refused but for those that follow.
        score_caps: settings by which scores are capped.
        logit_factors, logit_divisors, logit_caps: settings by which logits are multiplied, divided and capped
            (logits.py).
        latent_settings: settings that compress keys and values.
        positions_by_length: types of rotary positions whose frequencies follow the longest row of a call: a row's
            log-probs would depend on its company, and vLLM, which goes by the longest row that it may meet, would
            generate with others.
        positions_in_two: types with one table of frequencies up to a length and another one beyond (longest_row.py).
        disputed_window: whether vLLM's sliding window is one token longer than transformers'.
        state_weights: parts of weights' names in layers that carry a state across sequences: state space, linear
            attention, convolution; refused.
        unheeded: settings of such layers that vLLM does not heed, with the one value of which it computes what the
            library does; others are refused.
        incomparable: what keeps all of the family from being trained, as a message says it; empty: nothing.
        apart: whether a block has one norm, and behind it attention, such a layer or an MLP of two matrices.
        mixers: classes of such layers of which each row is computed by itself (penstock/engines/kernels/mixers.py).
        sink_weights: last parts of weights' names in attention with sinks.
        flex_alone: what its attention does that on a GPU FlexAttention alone computes (needs_flex in attention.py), but
            for a cap, which is a setting; empty: nothing.
        experts: how parameters of experts and of their routers end here, and how in vLLM, where both stack the experts
            alike; none: of an actor of this family no reshard could compare them.
        transposed: ends of names, here, of stacked matrices that vLLM has with rows and columns changed over.
        corrected: whether routers choose by corrected scores: their logits do not tell whom they choose, so there is
            neither a loss nor a figure of how evenly experts are used.
        corrections: last parts of names by which routers correct their choice of experts. The library may hold them as
            buffers, vLLM holds them as parameters; no gradient reaches them, and they are float32 whatever the weights.
        expert_settings: settings that count experts.
        expert_weights: parts of weights' names in experts.
        routers: parts of names, here and in files, of what chooses a token's experts.
        stored_experts: parts of weights' names in files, of experts without their routers, and shared_experts: of an
            MLP beside them that all tokens pass.
        served_beside_images: whether vLLM's class lies in a file with one that sees, and needs what that needs.
        encoder: where the encoder of images lies in transformers, and language: the decoder that reads what it makes
            (images.py); empty: the family has no images.
        served_names: how weights' names begin here, and in vLLM, where that differs; with a dot in front a part of
            them.
        stacked: matrices in which queries, keys and values come stacked in vLLM's order, by other names than its own.
    """

    model_types: tuple[str, ...] = ()
    query_key_value: Linear = Linear("qkv_proj", ("q_proj", "k_proj", "v_proj"))
    attention_output: Linear = Linear("o_proj", ("o_proj",))
    attention_gate: tuple[str, ...] = ()
    gate_up: Linear = Linear("gate_up_proj", ("gate_proj", "up_proj"))
    down: Linear = Linear("down_proj", ("down_proj",))
    delta_net: tuple[Linear, ...] = ()
    head: Linear = Linear("lm_head", ("lm_head",))
    query_norm: str = "q_norm"
    gated_mlps: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ("full_attention", WINDOWED)
    score_settings: tuple[str, ...] = ("attn_logit_softcapping",)
    logit_settings: tuple[str, ...] = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    score_caps: tuple[str, ...] = ()
    logit_factors: tuple[str, ...] = ()
    logit_divisors: tuple[str, ...] = ()
    logit_caps: tuple[str, ...] = ()
    latent_settings: tuple[str, ...] = ("kv_lora_rank",)
    positions_by_length: tuple[str, ...] = ("dynamic",)
    positions_in_two: tuple[str, ...] = ("longrope", "su")
    disputed_window: bool = False
    state_weights: tuple[str, ...] = ("A_log", "conv", "conv1d")
    unheeded: tuple[tuple[str, Any], ...] = ()
    incomparable: str = ""
    apart: bool = False
    mixers: tuple[str, ...] = ()
    sink_weights: tuple[str, ...] = ("sinks",)
    flex_alone: str = ""
    experts: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()
    corrected: bool = False
    corrections: tuple[str, ...] = ("e_score_correction_bias",)
    expert_settings: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    expert_weights: tuple[str, ...] = ("experts", "block_sparse_moe")
    routers: tuple[str, ...] = ("gate", "router")
    stored_experts: tuple[str, ...] = ("experts",)
    shared_experts: tuple[str, ...] = ("shared_expert", "shared_experts")
    served_beside_images: bool = False
    encoder: str = ""
    language: str = ""
    served_names: tuple[tuple[str, str], ...] = ()
    stacked: tuple[str, ...] = ()

    @property
    def block(self) -> tuple[Linear, ...]:
        """The linear layers of a block."""
        return self.query_key_value, self.attention_output, self.gate_up, self.down

    @property
    def block_names(self) -> set[str]:
        """Names of these layers, stacked as vLLM has them and one by one."""
        return {name for linear in self.block for name in (linear.served, *linear.parts)}

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of them."""
        return *self.block, *self.delta_net, self.head

    @property
    def language_head(self) -> str:
        """Name of the language head in transformers."""
        return self.head.parts[0]


USUAL = Family()
LATENT = "compresses keys and values (multi-head latent attention)"
SINKS, CAPS = "has attention sinks", "caps its attention scores"
MAMBA = ("in_proj", "conv1d")  # of Mamba 2: what comes stacked as in vLLM
APART = (  # a gated delta net of whose projections queries, keys and values alone come stacked
    Linear("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    Linear("in_proj_ba", ("in_proj_b", "in_proj_a")),
    Linear("out_proj", ("out_proj",)),
)
ANY_STEP = ("time_step_limit", [0.0, inf])


def _experts_in(block: str, own: str = "mlp") -> tuple[tuple[str, str], ...]:
    """How experts are called in transformers, in a block named `own`, and in vLLM, where it may have another name."""
    return (
        (f"{own}.experts.gate_up_proj", f"{block}.experts.w13_weight"),
        (f"{own}.experts.down_proj", f"{block}.experts.w2_weight"),
    )


FAMILIES: tuple[Family, ...] = (
    Family(("llama",), gated_mlps=("LlamaMLP",)),
    Family(("mistral",), gated_mlps=("MistralMLP",)),
    Family(("qwen2",), gated_mlps=("Qwen2MLP",)),
    Family(("qwen3",), gated_mlps=("Qwen3MLP",)),
    Family(("qwen2_moe", "qwen3_moe", "olmoe"), experts=_experts_in("mlp")),
    Family(("glm4_moe",), experts=_experts_in("mlp"), corrected=True),
    Family(
        ("exaone_moe",),
        experts=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"), *_experts_in("mlp")),
        corrected=True,
    ),
    Family(
        ("afmoe",),
        attention_gate=("gate_proj",),
        experts=(("mlp.router.gate.weight", "mlp.gate.weight"), *_experts_in("mlp")),
        corrected=True,
        corrections=("expert_bias",),
    ),
    Family(
        ("minimax_m2",), experts=_experts_in("mlp"), corrected=True, served_names=((".mlp.", ".block_sparse_moe."),)
    ),
    Family(("cohere2_moe",), logit_factors=("logit_scale",), disputed_window=True, experts=_experts_in("mlp")),
    Family(
        ("granitemoe",),
        logit_divisors=("logits_scaling",),
        experts=(
            ("block_sparse_moe.router.weight", "block_sparse_moe.gate.weight"),
            *_experts_in("block_sparse_moe", own="block_sparse_moe"),
        ),
        stored_experts=("input_linear", "output_linear"),
    ),
    Family(("deepseek_v2",), latent_settings=(), flex_alone=LATENT, experts=_experts_in("mlp")),
    Family(
        ("deepseek_v3", "glm4_moe_lite"),
        latent_settings=(),
        flex_alone=LATENT,
        experts=_experts_in("mlp"),
        corrected=True,
    ),
    Family(
        ("gpt_oss",),
        sink_weights=(),
        flex_alone=SINKS,
        experts=(
            *_experts_in("mlp"),
            ("mlp.experts.gate_up_proj_bias", "mlp.experts.w13_bias"),
            ("mlp.experts.down_proj_bias", "mlp.experts.w2_bias"),
        ),
        transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        served_names=((".self_attn.", ".attn."), (".embed_tokens.", ".embedding.")),
    ),
    Family(
        ("mixtral",), experts=(("mlp.gate.weight", "block_sparse_moe.gate.weight"), *_experts_in("block_sparse_moe"))
    ),
    Family(
        ("gpt_neox",),
        query_key_value=Linear("query_key_value", ("query_key_value",)),
        attention_output=Linear("dense", ("dense",)),
        gate_up=Linear("dense_h_to_4h", ("dense_h_to_4h",)),
        down=Linear("dense_4h_to_h", ("dense_4h_to_h",)),
        served_names=(("gpt_neox.", "model."),),
    ),
    Family(("cohere",), logit_factors=("logit_scale",)),
    Family(("cohere2",), logit_factors=("logit_scale",), disputed_window=True),
    Family(("granite",), logit_divisors=("logits_scaling",)),
    Family(
        ("qwen2_5_vl", "qwen3_vl"),
        encoder="model.visual",
        language="model.language_model",
        served_names=(
            ("model.visual.", "visual."),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
        stacked=("qkv",),
    ),
    Family(
        ("qwen3_next",),
        layer_types=("linear_attention", "full_attention"),
        state_weights=(),
        delta_net=(
            Linear("in_proj_qkvz", ("in_proj_qkvz",)),
            Linear("in_proj_ba", ("in_proj_ba",)),
            Linear("out_proj", ("out_proj",)),
        ),
        mixers=("Qwen3NextGatedDeltaNet",),
        experts=_experts_in("mlp"),
    ),
    Family(
        ("qwen3_5_text",),
        layer_types=("linear_attention", "full_attention"),
        state_weights=(),
        delta_net=APART,
        mixers=("Qwen3_5GatedDeltaNet",),
        served_beside_images=True,
        stacked=("in_proj_qkvz",),
    ),
    Family(
        ("qwen3_5_moe_text",),
        layer_types=("linear_attention", "full_attention"),
        state_weights=(),
        delta_net=APART,
        mixers=("Qwen3_5MoeGatedDeltaNet",),
        experts=_experts_in("mlp"),
        served_beside_images=True,
        stacked=("in_proj_qkvz",),
    ),
    Family(("qwen3_5", "qwen3_5_moe"), incomparable="has gated delta nets beside an encoder of images"),
    Family(
        ("mamba", "falcon_mamba", "jamba"),
        incomparable="has layers of Mamba 1, for whose scan vLLM has no kernel on a CPU",
    ),
    Family(
        ("bamba",), incomparable="has layers of Mamba 2 and no class in vLLM, which builds such from no other library's"
    ),
    Family(
        ("granitemoehybrid",),
        gate_up=Linear("input_linear", ("input_linear",)),
        down=Linear("output_linear", ("output_linear",)),
        logit_divisors=("logits_scaling",),
        layer_types=("linear_attention", "full_attention", "mamba", "attention"),
        state_weights=(),
        unheeded=(ANY_STEP, ("mamba_n_groups", 1)),
        mixers=("GraniteMoeHybridMambaLayer",),
        stacked=MAMBA,
    ),
    Family(
        ("falcon_h1",),
        logit_factors=("lm_head_multiplier",),
        state_weights=(),
        unheeded=(ANY_STEP, ("mamba_norm_before_gate", False)),
        mixers=("FalconH1Mixer",),
        served_names=((".mamba.", ".mamba.mamba."),),
        stacked=MAMBA,
    ),
    Family(
        ("nemotron_h",),
        gate_up=Linear("up_proj", ("up_proj",)),
        state_weights=(),
        apart=True,
        mixers=("NemotronHMamba2Mixer",),
        expert_settings=(),
        served_names=(("model.embeddings.", "model.embed_tokens."),),
        stacked=MAMBA,
    ),
    Family(
        ("lfm2",),
        attention_output=Linear("out_proj", ("out_proj",)),
        gate_up=Linear("w13", ("w1", "w3")),
        down=Linear("w2", ("w2",)),
        query_norm="q_layernorm",
        layer_types=("full_attention", "conv"),
        state_weights=(),
        mixers=("Lfm2ShortConv",),
        served_names=((".conv.", ".short_conv."),),
        stacked=("in_proj",),
    ),
    Family(("gemma2", "vaultgemma"), score_caps=("attn_logit_softcapping",), logit_caps=("final_logit_softcapping",)),
)


def family_of(model_type: str) -> Family:
    """Return the row of a configuration's `model_type`, or what is usual."""
    return next((family for family in FAMILIES if model_type in family.model_types), USUAL)
