"""Section of the model: a Hugging Face folder, or a tiny one made with random weights."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.configs.tree.section import PositiveInt, Section

AttentionKernel = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_4", "flex"]


class TinyEncoder(Section):
    """The encoder of images of a tiny model that sees, of Qwen2.5-VL's shape: 28 x 28 pixels become one token."""

    hidden_size: PositiveInt = Field(32, description="width; a multiple of 4 x heads")
    layers: PositiveInt = Field(2, description="blocks; the last one looks at the whole image, the others at windows")
    heads: PositiveInt = Field(2, description="attention heads")

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.hidden_size % (4 * self.heads):
            raise ValueError("hidden_size must be a multiple of 4 x heads")
        return self


class TinyModel(Section):
    """A random Qwen3-shaped model with a byte tokenizer, made in the run folder: for the quickstart and for tests."""

    hidden_size: PositiveInt = Field(
        96, description="width of the residual stream; a multiple of 32 x heads is fastest"
    )
    layers: PositiveInt = Field(3, description="transformer blocks")
    heads: PositiveInt = Field(3, description="query heads; hidden_size must be a multiple of it")
    kv_heads: PositiveInt = Field(3, description="key/value heads; heads must be a multiple of it")
    intermediate_size: PositiveInt = Field(256, description="width of the MLP")
    max_positions: PositiveInt = Field(256, description="longest sequence, tokens")
    tie_embeddings: bool = Field(True, description="one matrix for the input and the output embedding")
    encoder: TinyEncoder | None = Field(None, description="a Qwen2.5-VL-shaped model instead, which sees images")

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("hidden_size must be a multiple of heads, and heads a multiple of kv_heads")
        return self


class ModelConfig(Section):
    """Which causal language model the actor starts from."""

    path: str | None = Field(
        None,
        description="Hugging Face model folder on this machine (config, safetensors, tokenizer); or a model of the "
        "Hub, ORG/NAME or ORG/NAME@REVISION, or a registered one, models:/NAME@latest, models:/NAME@best or "
        "models:/NAME/3: these become a folder when a run begins",
    )
    version: str | None = Field(
        None,
        pattern=r"^models:/[^/@:]+/\d+$",
        description="registered model that 'path' is of: a run notes it here, and in the version that it registers",
    )
    revision: str | None = Field(
        None,
        pattern=r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$",
        description="model of the Hugging Face Hub, with its commit, that 'path' is of: a run notes it here",
    )
    trust_remote_code: bool = Field(
        False,
        description="load the Python code that 'path' brings for a configuration, model or tokenizer of its own; "
        "it runs with your rights and in no sandbox, so read it before",
    )
    code: dict[str, str] | None = Field(
        None, description="that code's files with the SHA-256 of each: a run notes them here, and loads no others"
    )
    tiny: TinyModel | None = Field(None, description="make a tiny random model instead of loading one")
    train_encoder: bool = Field(
        False, description="train the encoder of images, too, in the warm-up and afterwards; otherwise it rests"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="dtype of the weights in training and rollout; auto: bfloat16 on GPU, float32 on CPU"
    )
    attention: AttentionKernel = Field(
        "auto",
        description="kernel of attention in updates and log-probs: sdpa on a CPU, flash_attention_2 on a GPU, "
        "flash_attention_4 on a Hopper GPU, flex on a GPU, for capped scores, sinks, values of another size than the "
        "keys and float32; auto: the fastest that there is for the model",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.tiny is not None:
            raise ValueError("'path' and 'tiny' exclude each other: remove one (model.tiny=null)")
        for name in ("version", "revision"):
            if self.path is None and getattr(self, name) is not None:
                raise ValueError(f"'{name}' has no effect without 'path': remove it")
        if self.path is None and self.trust_remote_code:
            raise ValueError("'trust_remote_code' has no effect without 'path': remove it")
        if self.code is not None and not self.trust_remote_code:
            raise ValueError("'code' has no effect without 'trust_remote_code': remove it")
        return self
