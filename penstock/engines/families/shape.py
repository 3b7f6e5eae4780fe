"""A model's sizes, read from its folder without torch: what memory (memory.py) and FLOPs (flops.py) are counted from.

Left out: the weights themselves; what an architecture does beyond a decoder with MLPs or with experts
(`ModelShape.explained` tells).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.families.images import of_decoder
from penstock.engines.families.states import (
    ConvolutionSizes,
    DeltaSizes,
    MambaSizes,
    StateSizes,
    cache_bytes,
    convolution_sizes,
    mamba_sizes,
)
from penstock.engines.families.table import WINDOWED, Family, Linear, family_of

SHARED_GATE = "shared_expert_gate"  # what weighs the MLP beside experts
KV_BLOCK = 128  # tokens; vLLM hands out whole blocks, and its CPU blocks are the largest


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts that a layer has in place of an MLP: each is a gated MLP.

    Attributes:
        count: experts of a layer.
        chosen: of each token.
        inner: intermediate size of one.
        shared: intermediate size of an MLP beside them that all tokens pass; 0: none.
        shared_gate: whether that MLP's output is weighed token by token.
    """

    count: int
    chosen: int
    inner: int
    shared: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of attention whose keys and values are made of a vector of fewer numbers (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        keys: numbers of that vector; rotary: of the part of a key that all heads share, and that carries its position.
        queries: numbers of the vector that queries are made of; 0: they are made of the hidden state.
        value: size of a head's value.
    """

    keys: int
    rotary: int
    queries: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer with a gated MLP or experts in each layer."""

    parameters: int  # as stored in the files, a tied embedding once
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    window: int = 0  # tokens that a token of a windowed layer sees, itself included
    windowed_layers: int = 0
    query_key_norms: bool = False
    model_type: str = ""
    experts: ExpertSizes | None = None
    dense_layers: int = 0  # of a mixture: those that have an MLP in place of experts
    encoder: int = 0  # of the parameters: those of an encoder of images
    encoder_learns: bool = False
    latent: LatentSizes | None = None
    delta: DeltaSizes | None = None
    mamba: MambaSizes | None = None
    convolution: ConvolutionSizes | None = None
    without_attention: int = 0  # layers with something else in its place

    @property
    def states(self) -> StateSizes | None:
        """Sizes of its layers that carry a state, if it has such."""
        return self.delta or self.mamba or self.convolution

    @property
    def family(self) -> Family:
        """The row of the table that says how its layers are called."""
        return family_of(self.model_type)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of one layer by the names of their linear layers; of a mixture attention's.

        Of a model whose layers carry a state a layer with attention, with that beside it where it is; those of the
        others are `state_matrices`.
        """
        beside = {} if self.without_attention or self.mamba is None else self._state
        return {**self._attention, **beside, **({} if self.experts or self.family.apart else self._gated_mlp)}

    @property
    def state_matrices(self) -> dict[str, tuple[int, int]]:
        """Likewise of a layer that carries a state in place of attention."""
        if self.states is None or not self.without_attention:
            return {}
        return {**self._state, **({} if self.experts or self.family.apart else self._gated_mlp)}

    @property
    def _gated_mlp(self) -> dict[str, tuple[int, int]]:
        return self._mlp(self.intermediate_size)

    @property
    def _state(self) -> dict[str, tuple[int, int]]:
        hidden = self.hidden_size
        if (delta := self.delta) is not None:
            mixed, gates, out = self.family.delta_net
            return {
                **_parts(mixed, [delta.channels, delta.values], hidden),
                **_parts(gates, [delta.value_heads, delta.value_heads], hidden),
                **_parts(out, [hidden], delta.values),
            }
        if (mamba := self.mamba) is not None:
            return {"in_proj": (mamba.inner + mamba.channels + mamba.heads, hidden), "out_proj": (hidden, mamba.inner)}
        return {"in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden)}

    @property
    def kinds(self) -> list[tuple[int, dict[str, tuple[int, int]]]]:
        """How many layers there are of each kind, and the matrices of one, but for experts and routers.

        Of a mixture MLPs are kinds of their own: those beside experts, and those in place of experts.
        """
        kinds = [(self.attention_layers, self.matrices)]
        if self.states is not None and self.without_attention:
            kinds.append((self.states.layers, self.state_matrices))
        if self.states is not None and self.family.apart:
            (up,), (down,), inner = self.family.gate_up.parts, self.family.down.parts, self.intermediate_size
            mlp = {up: (inner, self.hidden_size), down: (self.hidden_size, inner)}
            kinds.append((self.without_attention - self.states.layers, mlp))
        if (experts := self.experts) is None:
            return kinds
        gate = {SHARED_GATE: (1, self.hidden_size)} if experts.shared_gate else {}
        beside = {**(self._mlp(experts.shared) if experts.shared else {}), **gate}
        return [*kinds, (self.mixtures, beside), (self.dense_layers, self._mlp(self.intermediate_size))]

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - self.without_attention

    def _mlp(self, inner: int) -> dict[str, tuple[int, int]]:
        up, down = self.family.gate_up, self.family.down
        return {**_parts(up, [inner, inner], self.hidden_size), **_parts(down, [self.hidden_size], inner)}

    @property
    def value_size(self) -> int:
        """Numbers of a head's value."""
        return self.head_size if self.latent is None else self.latent.value

    @property
    def _attention(self) -> dict[str, tuple[int, int]]:
        hidden, query = self.hidden_size, self.heads * self.head_size
        if (latent := self.latent) is None:
            key = self.kv_heads * self.head_size
            gated = query if self.delta is None else 2 * query
            projections = _parts(self.family.query_key_value, [gated, key, key], hidden)
            gate = dict.fromkeys(self.family.attention_gate, (query, hidden))
            return {**projections, **gate, **_parts(self.family.attention_output, [hidden], query)}
        made = self.heads * (self.head_size - latent.rotary + latent.value)
        queries = {"q_a_proj": (latent.queries, hidden), "q_b_proj": (query, latent.queries)}
        return {
            **(queries if latent.queries else {"q_proj": (query, hidden)}),
            "kv_a_proj_with_mqa": (latent.keys + latent.rotary, hidden),
            "kv_b_proj": (made, latent.keys),
            "o_proj": (hidden, self.heads * latent.value),
        }

    @property
    def block_matrices(self) -> int:
        """Parameters in the matrices of all layers: q, k, v, o, and the MLP's or all experts' gate, up and down."""
        return self._matrices_with(self.experts.count if self.experts is not None else 0)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without routers and what tokens pass besides."""
        if self.experts is None:
            return 0
        return self.mixtures * 3 * self.hidden_size * self.experts.count * self.experts.inner

    @property
    def matrices_per_token(self) -> int:
        """Parameters in those matrices that a token meets."""
        return self._matrices_with(self.experts.chosen if self.experts is not None else 0)

    def _matrices_with(self, experts: int) -> int:
        named = sum(layers * rows * columns for layers, kind in self.kinds for rows, columns in kind.values())
        named += 0 if (states := self.states) is None else states.layers * states.channels * states.taps
        if self.experts is None:
            return named
        return named + self.mixtures * self.hidden_size * (3 * experts * self.experts.inner + self.experts.count)

    def adapter_parameters(self, lora: LoraConfig | None) -> int:
        """Parameters of the adapters: `rank` times rows and columns of each target; 0 without any."""
        return self._adapters_with(lora, self.experts.count if self.experts is not None else 0)

    def adapter_parameters_per_token(self, lora: LoraConfig | None) -> int:
        """Parameters of the adapters that a token meets."""
        return self._adapters_with(lora, self.experts.chosen if self.experts is not None else 0)

    def _adapters_with(self, lora: LoraConfig | None, experts: int) -> int:
        if lora is None:
            return 0
        named = [(layers, sizes) for layers, kind in self.kinds for name, sizes in kind.items() if _is(lora, name)]
        linears = sum(layers * sum(sizes) for layers, sizes in named)
        if self.experts is None or not lora.experts:
            return lora.rank * linears
        sides = 3 * self.experts.inner + 2 * self.hidden_size  # of one expert's gate and up as one matrix, and its down
        return lora.rank * (linears + self.mixtures * experts * sides)

    @property
    def mixtures(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.layers - self.dense_layers

    def trained_parameters(self, lora: LoraConfig | None) -> int:
        """Parameters that get a gradient: all, or those of the adapters."""
        if lora:
            return self.adapter_parameters(lora)
        return self.parameters - (0 if self.encoder_learns else self.encoder)

    def merged_parameters(self, lora: LoraConfig | None) -> int:
        """Parameters that vLLM cannot share with the base: matrices with a target, those that it fuses as a whole."""
        if lora is None:
            return 0
        linears = sum(
            layers * rows * columns
            for layers, kind in self.kinds
            for name in self._touched(lora, kind.keys())
            for rows, columns in [kind[name]]
        )
        return linears + (self.expert_parameters if lora.experts else 0)

    def _touched(self, lora: LoraConfig, kind: Set[str]) -> set[str]:
        """Which matrices of a kind of layers have an adapter, or are fused with one that has."""
        fused = [linear.parts for linear in (*self.family.block, *self.family.delta_net) if kind >= set(linear.parts)]
        together = {name: parts for parts in fused for name in parts}
        return {name for name in kind if any(_is(lora, part) for part in together.get(name, (name,)))}

    def adapters(self, lora: LoraConfig) -> int:
        """How many linear layers get an adapter."""
        return sum(layers for layers, kind in self.kinds for name in kind if _is(lora, name))

    def kv_numbers(self, tensor_parallel: int) -> int:
        """Numbers that a KV cache holds of one token, on each of the ranks that an engine is cut over.

        Latents are not kept (penstock/engines/rollout/vllm.py), and values are made as long as keys.
        """
        return 2 * self.attention_layers * max(1, self.kv_heads // tensor_parallel) * self.head_size

    def kv_cache_bytes(self, sequences: int, length: int, width: int, tensor_parallel: int, cuda: bool) -> int:
        """Bytes of a KV cache with room for so many whole sequences; of states, where there are any, on a GPU alone."""
        if self.states is not None and cuda:
            per_token = 2 * self.kv_heads * self.head_size * width
            return cache_bytes(self.states, self.attention_layers, per_token, width, length, sequences)
        return self.kv_numbers(tensor_parallel) * width * (-(-length // KV_BLOCK) * KV_BLOCK) * sequences

    @property
    def explained(self) -> bool:
        """Whether the sizes explain the parameters within 3 %: adapters, or layers that differ, are something else."""
        embedding = self.vocabulary * self.hidden_size
        known = self.states is not None or not self.family.mixers
        return known and any(
            abs((self.parameters - self.encoder) / (self.block_matrices + count * embedding) - 1) < 0.03
            for count in (1, 2)
        )


def read_shape(folder: Path) -> ModelShape:
    """Read a model's sizes from its configuration and the headers of its weight files.

    Raises:
        KeyError: the configuration lacks a size.
        ValueError: a file is damaged.
    """
    return shape_of_weights(read_settings(folder), weight_shapes(folder))


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a model's configuration."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return settings


def shape_of_weights(config: Mapping[str, Any], weights: Mapping[str, Sequence[int]]) -> ModelShape:
    """Return a model's sizes from its configuration and the shapes of its weights by name.

    Of layers for several tokens at a time, which nothing here loads, none is counted.

    Raises:
        KeyError: the configuration lacks a size.
    """
    config = of_decoder(config)
    weights = _loaded(config, weights)
    heads, model_type = config["num_attention_heads"], config.get("model_type", "")
    family = family_of(model_type)
    latent = _latent(config, family)
    attention = sum(name.endswith(".q_proj.weight") for name in weights) if family.mixers else _layers(config)
    windowed_layers, query_norm = _windowed_layers(config), f".{family.query_norm}.weight"
    return ModelShape(
        parameters=sum(prod(shape) for shape in weights.values()),
        layers=_layers(config),
        hidden_size=config["hidden_size"],
        intermediate_size=_inner(family, weights) or config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_size=_head_size(config, heads) if latent is None else config["qk_nope_head_dim"] + latent.rotary,
        vocabulary=config["vocab_size"],
        positions=config.get("max_position_embeddings", 1 << 20),
        window=config["sliding_window"] if windowed_layers else 0,
        windowed_layers=windowed_layers,
        query_key_norms=any(name.endswith(query_norm) for name in weights),
        model_type=model_type,
        latent=latent,
        delta=_delta(config, family, weights),
        mamba=mamba_sizes(config, weights) if family.mixers and not family.delta_net else None,
        convolution=convolution_sizes(config, weights) if family.mixers else None,
        without_attention=_layers(config) - attention,
        encoder=_encoder(family, weights),
        **_experts(config, family, weights),
    )


def _layers(config: Mapping[str, Any]) -> int:
    blocks = config.get("layers_block_type")  # by which some say how many there are
    return len(blocks) if blocks else int(config["num_hidden_layers"])


def _loaded(config: Mapping[str, Any], weights: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the weights of a file without layers for several tokens at a time, which are behind all others."""
    behind = re.compile(r"mtp\.|model\.layers\.(\d+)\.")
    found = {name: behind.match(name) for name in weights}
    none = {name for name, match in found.items() if match and int(match[1] or _layers(config)) >= _layers(config)}
    return {name: shape for name, shape in weights.items() if name not in none}


def _inner(family: Family, weights: Mapping[str, Sequence[int]]) -> int:
    """Return the inner size of the MLPs of a model with states, which not all configurations give; 0: of another."""
    ends = f".{family.down.parts[0]}.weight"
    sizes = (shape[1] for name, shape in weights.items() if name.endswith(ends) and ".shared_expert." not in name)
    return next(sizes, 0) if family.mixers and not family.experts else 0


def _head_size(config: Mapping[str, Any], heads: int) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // heads
    return size


def _latent(config: Mapping[str, Any], family: Family) -> LatentSizes | None:
    if family.latent_settings or not config.get("kv_lora_rank"):  # other models that have it are refused
        return None
    return LatentSizes(
        keys=config["kv_lora_rank"],
        rotary=config["qk_rope_head_dim"],
        queries=config.get("q_lora_rank") or 0,
        value=config["v_head_dim"],
    )


def _delta(config: Mapping[str, Any], family: Family, weights: Mapping[str, Sequence[int]]) -> DeltaSizes | None:
    if not family.delta_net:
        return None
    return DeltaSizes(
        layers=sum(name.endswith(".A_log") for name in weights),  # files need not list the types of layers
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key=config["linear_key_head_dim"],
        value=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
    )


def _is(lora: LoraConfig, name: str) -> bool:
    """Whether linear layers of this name get an adapter."""
    return lora.targets is None or name in lora.targets


def _experts(config: Mapping[str, Any], family: Family, weights: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What a shape says of a mixture whose experts a family's row knows; of one expert by the weights of all.

    Raises:
        KeyError: the configuration lacks a size.
    """
    if not family.experts:
        return {}
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = {name: prod(shape) for name, shape in weights.items() if not name.endswith("bias")}
    stored = {name: numel for name, numel in matrices.items() if _within(name, family.stored_experts)}
    shared = sum(prod(shape) for name, shape in weights.items() if _within(name, family.shared_experts))
    mixtures = len({name.partition(".layers.")[2].partition(".")[0] for name in stored}) or layers
    count = config[next((name for name in family.expert_settings if name in config), family.expert_settings[0])]
    sizes = ExpertSizes(
        count=count,
        chosen=config["num_experts_per_tok"],
        inner=sum(stored.values()) // (3 * hidden * count * mixtures),
        shared=shared // (3 * hidden * mixtures),
        shared_gate=any(_within(name, (SHARED_GATE,)) for name in weights),
    )
    return {"experts": sizes, "dense_layers": layers - mixtures}


def _encoder(family: Family, weights: Mapping[str, Sequence[int]]) -> int:
    """Parameters of an encoder of images, in files of either library's names."""
    encoder = family.encoder.rpartition(".")[2]
    return sum(prod(shape) for name, shape in weights.items() if encoder and _within(name, (encoder,)))


def _within(name: str, parts: tuple[str, ...]) -> bool:
    return not set(parts).isdisjoint(name.split("."))


def layer_names(folder: Path) -> set[str]:
    """Return the last names of the layers with a matrix inside a model's blocks, from its weight files' headers.

    Of a mixture without experts and routers, which are no linear layers.
    """
    settings = of_decoder(read_settings(folder))
    family, weights = family_of(settings.get("model_type", "")), _loaded(settings, weight_shapes(folder))
    others = (*family.stored_experts, *family.routers) if family.experts else ()
    matrices = [name for name, shape in weights.items() if len(shape) == 2 and not _within(name, others)]
    within = (name.split(".") for name in matrices)
    return {parts[-2] for parts in within if parts[-1] == "weight" and any(part.isdigit() for part in parts)}


def expert_names(folder: Path) -> set[str]:
    """Return how parts of a mixture's experts are called, in its files and in the library; none without experts."""
    family = family_of(of_decoder(read_settings(folder)).get("model_type", ""))
    if not family.experts:
        return set()
    stored = (name for name in weight_shapes(folder) if _within(name, family.stored_experts))
    ends = (*stored, *(own for own, _ in family.experts if _within(own, ("experts",))))
    return {name.removesuffix(".weight").rpartition(".")[2] for name in ends}


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of a model's weights by name, from its files' headers."""
    headers = (_header(path) for path in folder.glob("*.safetensors"))
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def _parts(linear: Linear, rows: list[int], columns: int) -> dict[str, tuple[int, int]]:
    """Sizes of a linear layer's parts, or of the one in which they come stacked."""
    counts = rows if len(linear.parts) > 1 else [sum(rows)]
    return {name: (count, columns) for name, count in zip(linear.parts, counts, strict=True)}


def _windowed_layers(config: Mapping[str, Any]) -> int:
    """Layers with a sliding window, in the three ways in which configs say so."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if "layer_types" in config:
        return int(config["layer_types"].count(WINDOWED))
    return int(config["num_hidden_layers"] - config.get("max_window_layers", 0))


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of each tensor: it begins with a length and a JSON object."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
