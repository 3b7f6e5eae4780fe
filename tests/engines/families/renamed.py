"""A Llama whose layers have other names, as families that are not in the table may have; vLLM serves it as a Llama.

Its numbers are those of Llama. Names and order of the layers are others: only the table knows which belong together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.families.table import FAMILIES, Family, Linear
from tests.engines.shared_ranks import EOS, PAD, VOCABULARY

TABLE = FAMILIES  # without a row for it
ROW = Family(
    ("renamed_llama",),
    query_key_value=Linear("qkv_proj", ("wq", "wk", "wv")),
    attention_output=Linear("o_proj", ("wo",)),
    gate_up=Linear("gate_up_proj", ("w1", "w3")),
    down=Linear("down_proj", ("w2",)),
    head=Linear("lm_head", ("output",)),
    gated_mlps=("RenamedMLP",),
)


class RenamedConfig(LlamaConfig):
    model_type = "renamed_llama"


def _named(name: str) -> Any:
    return property(lambda module: getattr(module, name))


def _rename(module: nn.Module, kind: type[nn.Module], **names: str) -> None:
    module.__class__ = kind
    for old, new in names.items():
        module.add_module(new, module._modules.pop(old))


class RenamedAttention(LlamaAttention):
    q_proj, k_proj, v_proj, o_proj = _named("wq"), _named("wk"), _named("wv"), _named("wo")


class RenamedMLP(LlamaMLP):
    gate_proj, up_proj, down_proj = _named("w1"), _named("w3"), _named("w2")


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """Called so, since configurations name the architecture that vLLM serves them as."""

    config_class = RenamedConfig
    lm_head = _named("output")

    def __init__(self, config: RenamedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            _rename(layer.self_attn, RenamedAttention, v_proj="wv", k_proj="wk", q_proj="wq", o_proj="wo")
            _rename(layer.mlp, RenamedMLP, up_proj="w3", gate_proj="w1", down_proj="w2")
        _rename(self, type(self), lm_head="output")


def register() -> None:
    """Let this process's transformers know the model."""
    AutoConfig.register("renamed_llama", RenamedConfig, exist_ok=True)
    AutoModelForCausalLM.register(RenamedConfig, LlamaForCausalLM, exist_ok=True)


def table_with_row() -> tuple[Family, ...]:
    """Return the table with a row for it."""
    return (*TABLE, ROW)


def write(folder: Path) -> Path:
    """Write a folder with random weights."""
    register()
    config = RenamedConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM serves on CPU
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        lm = LlamaForCausalLM(config)
    lm.save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder
