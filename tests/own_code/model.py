"""A tiny model whose configuration, model and tokenizer are of classes that only its folder has code for.

The model is a Llama whose MLPs count `mlp_scale` times, so that a Llama with its weights gives other logits; the
tokenizer has a token for each character of a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.shared_ranks import Shape

CHARACTERS = "0123456789+-*=. abcdefghijklmnopqrstuvwxyz[]/()"

CONFIGURATION = """
from transformers import LlamaConfig


class OursConfig(LlamaConfig):
    model_type = "ours"

    def __init__(self, mlp_scale=0.5, **others):
        super().__init__(**others)
        self.mlp_scale = mlp_scale
"""
MODEL = """
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP

from .configuration_ours import OursConfig


class OursMLP(LlamaMLP):
    def forward(self, hidden):
        return super().forward(hidden) * self.config.mlp_scale


class OursModel(LlamaModel):
    config_class = OursConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = OursMLP(config)
        self.post_init()


class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OursModel(config)
        self.post_init()
"""
TOKENIZER = """
from pathlib import Path

from transformers import PreTrainedTokenizer


class OursTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"letters": "letters.ours"}

    def __init__(self, letters, **others):
        self.tokens = ["<pad>", "<eos>", "<unk>", *Path(letters).read_text(encoding="utf-8")]
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        super().__init__(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", **others)

    @property
    def vocab_size(self):
        return len(self.tokens)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 2)

    def _convert_id_to_token(self, place):
        return self.tokens[place] if place < len(self.tokens) else "<unk>"

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
"""
AUTO_MAP = {
    "AutoConfig": "configuration_ours.OursConfig",
    "AutoModel": "modeling_ours.OursModel",
    "AutoModelForCausalLM": "modeling_ours.OursForCausalLM",
}


def write_own_model(folder: Path) -> None:
    """Write such a model with its own tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    Shape("llama", tied=False).write(folder)
    change_settings(folder, model_type="ours", architectures=["OursForCausalLM"], mlp_scale=0.5, auto_map=AUTO_MAP)
    (folder / "configuration_ours.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_ours.py").write_text(MODEL, encoding="utf-8")
    give_own_tokenizer(folder)


def give_own_tokenizer(folder: Path) -> None:
    """Let a model's tokenizer be the one of the folder's own code, in place of the one it has."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenization_ours.py").write_text(TOKENIZER, encoding="utf-8")
    (folder / "letters.ours").write_text(CHARACTERS, encoding="utf-8")
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_ours.OursTokenizer", None]},
        "tokenizer_class": "OursTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def change_settings(folder: Path, **settings: object) -> None:
    """Change settings of a model's configuration; None takes one out."""
    path = folder / "config.json"
    changed = json.loads(path.read_text(encoding="utf-8")) | settings
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}), encoding="utf-8")
