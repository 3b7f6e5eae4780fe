"""Sizes of layers that carry a state from token to token, and of what vLLM keeps of them for each sequence.

They are read from a configuration, in the words of each family, and from the shapes of weights, which say how many
layers have such a state. Left out: gated delta nets' matrices (shape.py), and how the layers are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOAT32 = 4
BLOCK = 16  # tokens: what vLLM's block of a KV cache is a multiple of


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of gated delta nets, which most layers of a model have in place of attention (arXiv 2412.06464).

    The queries of its other layers have a gate of their size beside them.

    Attributes:
        layers: that have one.
        key_heads, value_heads: of queries and keys, and of values, each of which has a state.
        key, value: sizes of a head: a state is a matrix of keys by values.
        taps: tokens that the convolution before it sees.
        chunk: tokens that the library computes together.
    """

    layers: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    chunk: int = 64

    @property
    def keys(self) -> int:
        """Numbers of all keys, and of all queries, as a token makes them."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Numbers of all values."""
        return self.value_heads * self.value

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution sees: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.value_heads * self.key * self.value


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of layers of Mamba 2 (arXiv 2405.21060), in place of attention or beside it.

    Attributes:
        layers: that have one.
        heads: each of which has a state, a matrix of `head` by `size`; groups: that share what is read and written by.
        taps: tokens that the convolution before it sees.
        chunk: tokens that the library computes together.
        normed: whether its output is normed.
    """

    layers: int
    heads: int
    head: int
    size: int
    groups: int
    taps: int
    chunk: int
    normed: bool = True

    @property
    def inner(self) -> int:
        """Numbers of all heads of a token."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution sees: of the heads, and of what is read and written by."""
        return self.inner + 2 * self.groups * self.size

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.inner * self.size


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes of gated short convolutions in place of attention (LFM2).

    Attributes:
        layers: that have one.
        channels: numbers of a token that it sees.
        taps: tokens that it sees.
    """

    layers: int
    channels: int
    taps: int
    state: int = 0  # beside its last inputs it keeps none
    chunk: int = 1


StateSizes = DeltaSizes | MambaSizes | ConvolutionSizes


def mamba_sizes(config: Mapping[str, Any], weights: Mapping[str, Sequence[int]]) -> MambaSizes | None:
    """Return those of Mamba 2, of a family that has no gated delta nets; None without such layers."""
    layers = sum(name.endswith(".A_log") for name in weights)
    if not layers:
        return None

    def named(*names: str) -> int:
        return int(next(config[name] for name in names if config.get(name) is not None))

    return MambaSizes(
        layers=layers,
        heads=named("mamba_n_heads", "mamba_num_heads"),
        head=named("mamba_d_head", "mamba_head_dim"),
        size=named("mamba_d_state", "ssm_state_size"),
        groups=named("mamba_n_groups", "n_groups"),
        taps=named("mamba_d_conv", "conv_kernel"),
        chunk=named("mamba_chunk_size", "chunk_size"),
        normed=any(".mamba.norm." in name or ".mixer.norm." in name for name in weights),
    )


def convolution_sizes(config: Mapping[str, Any], weights: Mapping[str, Sequence[int]]) -> ConvolutionSizes | None:
    """Return those of gated short convolutions; None without such layers."""
    layers = sum(name.endswith(".conv.conv.weight") for name in weights)
    return ConvolutionSizes(layers, config["hidden_size"], config["conv_L_cache"]) if layers else None


def cache_bytes(
    sizes: StateSizes, attention_layers: int, per_token: int, width: int, length: int, sequences: int
) -> int:
    """Return what vLLM's cache takes that has room for whole sequences, of layers with keys and of layers with states.

    Its pages are all as large as each other: a block of tokens has as many keys as take at least a layer's state. A
    group of layers has blocks of its own, and one of layers with states one block for each sequence (vLLM 0.26,
    v1/core/kv_cache_utils.py and platforms/interface.py).

    Args:
        attention_layers: those with keys; at least one.
        per_token: bytes of the keys and values of a token in one layer.
        width: bytes of a weight.
        length: tokens of a sequence; sequences: how many of them.
    """
    state = FLOAT32 * sizes.state + width * sizes.channels * (sizes.taps - 1)
    block = BLOCK * -(-state // (BLOCK * per_token))
    fewer, more = sorted((attention_layers, sizes.layers))
    group = more if more < 1.5 * fewer else fewer
    blocks = -(-attention_layers // group) * -(-length // block) + -(-sizes.layers // group)
    return group * block * per_token * (sequences * blocks + 1)  # one block is nobody's
