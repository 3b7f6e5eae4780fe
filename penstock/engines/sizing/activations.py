"""What a forward pass keeps for the backward pass, module by module, in bytes per token: the table behind memory.py.

Each line says which tensor is kept and why autograd needs it. `tests/engines/sizing/test_activations.py` holds the
table against what autograd really keeps, so a changed module shows there. The table is for decoders with RMSNorm,
rotary embeddings and a gated MLP (Llama, Mistral, Qwen) or experts in grouped products (Mixtral, Qwen MoE), and with
layers that carry a state in place of attention or beside it: gated delta nets (Qwen3-Next, Qwen3.5), Mamba 2
(Granite 4, Falcon-H1, Nemotron-H), short convolutions (LFM2). `w` is the width of a weight in bytes. A layer of a
mixture that has an MLP in place of experts counts as the others do: such an MLP is about as wide as what a token meets
of the experts.

Layers that carry a state compute rows side by side, padded (penstock/engines/batches/row_groups.py), and as the
transformers library does without other packages: its functions in PyTorch, since release 5.18 for Mamba 2. They are not
compiled with their blocks.

Left out: what lives only while one module runs; memory.py has an allowance for it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engines.families.shape import ModelShape

FLOAT32 = 4
INDEX = 8  # int64


@dataclass(frozen=True)
class Kept:
    """Tensors of one module that wait for the backward pass."""

    module: str
    bytes_per_token: int
    reason: str


@dataclass(frozen=True)
class Computation:
    """How a model's forward and backward pass are computed: what waits between them depends on it."""

    width: int  # bytes of a weight
    device: str  # "cpu" or "cuda"
    compiled: bool = False  # torch.compile recomputes in the backward pass what takes no matrix product
    gated: bool = False  # one product of gate, up and activation (kernels/gated_mlp.py), which recomputes the latter
    checkpointing: bool = False  # a block keeps its input alone and is computed again
    on_host: bool = False  # those inputs wait in host memory (models/host_activations.py)
    exchanged: bool = False  # ranks exchange heads for tokens around attention (kernels/sequence_parallel.py)


@dataclass(frozen=True)
class MicroBatch:
    """What of a micro-batch decides how much it keeps."""

    tokens: int
    responses: int  # how many of the tokens are response tokens
    keys: float = 1.0  # in attention, per token (`keys_per_token`)
    padded: float = 1.0  # tokens that layers with a state compute for each key, padding among them


def layer_table(shape: ModelShape, computation: Computation, keys: float = 1.0) -> list[Kept]:
    """Return what one transformer block keeps per token, without checkpointing.

    `keys`: in attention, per token of the micro-batch (`keys_per_token`).
    """
    w, compiled = computation.width, computation.compiled
    hidden, inner = shape.hidden_size, shape.intermediate_size if shape.experts is None else shape.experts.shared
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    normed = query + key if shape.query_key_norms else 0
    roots = shape.heads + shape.kv_heads if shape.query_key_norms else 0
    table = [
        Kept("norms' output", 2 * w * hidden, "input of q, k, v; input of gate and up"),
        Kept("norms' root", 2 * FLOAT32, "one number per token and norm"),
        Kept("query and key norms' root", FLOAT32 * roots, "one number per token and head, where there are such norms"),
        Kept("q after rotary", w * query, "attention; before rotary it is not needed"),
        Kept("attention's output", w * query, "attention, and input of o_proj: one tensor"),
        Kept("attention's logsumexp", FLOAT32 * shape.heads, "attention"),
        *_mlp_table(inner, computation),
        *_expert_table(shape, computation),
        *_gate_table(shape, computation),
    ]
    if computation.exchanged and computation.device == "cuda":  # elsewhere attention keeps its output by rows
        table.append(Kept("attention's output, exchanged", w * query, "input of o_proj, no longer the same tensor"))
    if compiled:
        table += [
            Kept("block's input", w * hidden, "first norm"),
            Kept("o_proj's output", w * hidden, "with the block's input, the second norm's input"),
            Kept(
                "query and key norms' input", w * (normed and normed + key), "their backward pass; values lie beside it"
            ),
        ]
    else:
        table += [
            Kept("norms' input", 2 * FLOAT32 * hidden, "in float32; where w is 4 the residual stream itself"),
            Kept("norms' normalised", 2 * w * hidden, "its product with the norm's weight"),
            Kept("query and key norms", (FLOAT32 + w) * normed, "input in float32 and normalised"),
        ]
    if computation.device == "cuda" or not compiled:
        table.append(Kept("k and v", int(2 * w * key * keys), "attention; a shared prompt's once per response"))
    if computation.device == "cpu":
        by_rows = int(2 * w * (query + key) * keys)
        table.append(Kept("attention by rows", by_rows, "q, k, v and output, spread to whole rows"))
    return table


def delta_table(shape: ModelShape, computation: Computation, keys: float = 1.0) -> list[Kept]:
    """Return likewise what a block with a gated delta net keeps, as the transformers library computes it in chunks.

    `keys`: that it computes per token of the micro-batch, padding among them.
    """
    assert shape.delta is not None
    w, hidden, heads = computation.width, shape.hidden_size, shape.delta.value_heads
    key, value = heads * shape.delta.key, shape.delta.values
    inner = shape.intermediate_size if shape.experts is None else shape.experts.shared
    copies = 4 if w == FLOAT32 else 0  # what is converted to float32 lies as products want it
    mixed = [
        Kept("rows", 2 * w * hidden + INDEX, "input of the projections, spread to whole rows"),
        Kept("convolution", 2 * w * shape.delta.channels, "its input; its activation's"),
        Kept("strength and decay", (w + 6 * FLOAT32) * heads, "their activations; decays up to a token"),
        Kept("queries, keys and values", FLOAT32 * (3 * key + value + 2 * heads), "norms; products with the strength"),
        Kept(
            "pairs within a chunk",
            5 * FLOAT32 * heads * shape.delta.chunk,
            "decays, both products, the system, its attention",
        ),
        Kept("products' input", (2 + copies) * FLOAT32 * key, "queries and keys by strength"),
        Kept("solved system", FLOAT32 * (key + value), "new values, and what they take from the state"),
        Kept(
            "states", FLOAT32 * heads * shape.delta.key * shape.delta.value // shape.delta.chunk, "one for each chunk"
        ),
        Kept("read and added", FLOAT32 * (2 * key + value), "products with the state"),
        Kept(
            "gated norm", (3 * FLOAT32 + 2 * w) * value + FLOAT32 * heads, "input, gate and activated gate; normalised"
        ),
        Kept("gated norm's output", w * value, "input of out_proj"),
    ]
    return [
        *_of_keys(mixed, keys),
        Kept("second norm's output", w * hidden, "input of gate and up"),
        Kept("norms", 2 * (2 * FLOAT32 * hidden + FLOAT32), "input and normalised, in float32; one number per token"),
        *_mlp_table(inner, computation),
        *_expert_table(shape, computation),
    ]


def mamba_table(shape: ModelShape, computation: Computation, keys: float = 1.0) -> list[Kept]:
    """Return likewise what Mamba 2 keeps in a block, without its norms and its MLP.

    What chunks hand on to each other is counted for each, and not for each pair of them: that is little.
    """
    assert shape.mamba is not None
    w, hidden, mamba = computation.width, shape.hidden_size, shape.mamba
    inner, heads, channels = mamba.inner, mamba.heads, mamba.channels
    copied = w < FLOAT32  # to float32
    mixed = [
        Kept("rows", 2 * w * hidden, "input of the projection, spread to whole rows"),
        Kept("projected", w * (inner + channels + heads), "gate, the convolution's input and steps: one tensor"),
        Kept("convolution", w * channels, "its activation's input"),
        Kept("convolution's output", FLOAT32 * (inner if copied else channels), "its product with the steps"),
        Kept("steps", 2 * w * heads + (1 + copied) * FLOAT32 * heads, "softplus, and bounds; products with them"),
        Kept("skipped", FLOAT32 * inner, "its product with D"),
        Kept("pairs within a chunk", 3 * FLOAT32 * heads * mamba.chunk, "decays, products, and both multiplied"),
        Kept(
            "read and written by", 5 * FLOAT32 * heads * mamba.size, "for each head: products, with decays and without"
        ),
        Kept(
            "heads' numbers", 3 * FLOAT32 * inner, "products in a chunk and with the state; what is read of the state"
        ),
        Kept("decays", 2 * FLOAT32 * heads, "to the end of a chunk and from its beginning"),
        Kept("states", 2 * FLOAT32 * mamba.state // mamba.chunk, "one for each chunk, at its end and before it"),
        Kept(
            "gated norm",
            (4 + copied) * FLOAT32 * inner + FLOAT32 * mamba.groups,
            "input, gate and activated gate, their product, normalised; one number per token and group",
        ),
        Kept("gated norm's output", w * inner, "input of out_proj"),
    ]
    return _of_keys(mixed, keys)


def convolution_table(shape: ModelShape, computation: Computation, keys: float = 1.0) -> list[Kept]:
    """Return likewise what a gated short convolution keeps in a block, without its norms and its MLP."""
    w, hidden = computation.width, shape.hidden_size
    mixed = [
        Kept("rows", 2 * w * hidden, "input of the projection, spread to whole rows"),
        Kept("projected", 3 * w * hidden, "both gates and what they gate: one tensor"),
        Kept("convolution", 2 * w * hidden, "its input; its output, for its product with the second gate"),
        Kept("gated", w * hidden, "input of out_proj"),
    ]
    return _of_keys(mixed, keys)


def _of_keys(table: list[Kept], keys: float) -> list[Kept]:
    """Return per token what a table says of each key that a layer with a state computes."""
    return [Kept(kept.module, int(kept.bytes_per_token * keys), kept.reason) for kept in table]


def _norm_table(shape: ModelShape, w: int, count: int) -> list[Kept]:
    """What so many norms before something else than attention keep per token."""
    return [Kept("norms", count * ((FLOAT32 + w) * shape.hidden_size + FLOAT32), "input in float32, normalised, root")]


def _behind_table(shape: ModelShape, computation: Computation) -> list[Kept]:
    """What a block keeps besides its layer with a state: two norms, and an MLP."""
    w = computation.width
    return [
        Kept("second norm's output", w * shape.hidden_size, "input of gate and up"),
        *_norm_table(shape, w, 2),
        *_mlp_table(shape.intermediate_size, computation),
    ]


def _gate_table(shape: ModelShape, computation: Computation) -> list[Kept]:
    """What attention keeps besides, per token, in a model with delta nets: a gate, and norms in float32."""
    if shape.delta is None:
        return []
    w, query, key = computation.width, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    beside = w * query if w == FLOAT32 else 0
    return [
        Kept("attention's gate", 2 * w * query + beside, "activated; its product, input of o_proj; beside queries"),
        Kept("norms in float32", (FLOAT32 - w) * (2 * shape.hidden_size + query + key), "normalised"),
    ]


def _mlp_table(inner: int, computation: Computation) -> list[Kept]:
    """What a gated MLP keeps per token."""
    w = computation.width
    return [
        Kept("gate", w * inner, "activation function"),
        Kept("up", w * inner, "its product with the activated gate"),
        Kept("activated gate", 0 if computation.compiled else w * inner, "its product with up"),
        Kept("product", 0 if computation.gated else w * inner, "input of down_proj"),
    ]


def _expert_table(shape: ModelShape, computation: Computation) -> list[Kept]:
    """What the experts of a layer and their router keep per token of the micro-batch; nothing without experts."""
    if (experts := shape.experts) is None:
        return []
    w, chosen = computation.width, experts.chosen
    inner, hidden = chosen * w * experts.inner, chosen * w * shape.hidden_size
    return [
        Kept("experts' tokens", hidden, "input of gate and up, once for each expert of a token"),
        Kept("experts' gate and up", 2 * inner, "activation function, and its product"),
        Kept("experts' activated gate", 0 if computation.compiled else inner, "its product with up"),
        Kept("experts' product", inner, "input of down"),
        Kept("experts' output", hidden, "its product with the router's weight"),
        Kept("experts' order", 4 * INDEX * chosen, "which experts a token has, and where it lies among theirs"),
        Kept("router's probabilities", (w if computation.compiled else FLOAT32) * experts.count, "softmax"),
        Kept("router's weights", 2 * FLOAT32 * chosen, "their sum is 1; product with the experts' output"),
        Kept(
            "shared MLP's output", w * shape.hidden_size if experts.shared_gate else 0, "its product with its own gate"
        ),
    ]


def model_table(shape: ModelShape, w: int) -> list[Kept]:
    """Return what is kept per token outside of the blocks."""
    hidden = shape.hidden_size
    return [
        Kept("token ids and indices", 2 * INDEX, "embedding; choice of the response's positions"),
        Kept("rotary table", 2 * w * shape.head_size, "cosines and sines, once for all layers"),
        Kept(
            "final norm",
            (FLOAT32 + w) * hidden + FLOAT32,
            "as in a block; its output is only picked from",
        ),
    ]


def response_table(shape: ModelShape, w: int) -> list[Kept]:
    """Return what is kept per response token: the language head's side (kernels/lm_head.py), without any logits."""
    return [
        Kept("final hidden states", w * shape.hidden_size, "input of the head"),
        Kept("targets and their positions", 2 * INDEX, "the head's gradient"),
        Kept("normaliser and entropy", 2 * FLOAT32, "softmax again in the backward pass"),
    ]


def total(table: list[Kept]) -> int:
    """Return a table's bytes per token."""
    return sum(kept.bytes_per_token for kept in table)


def keys_per_token(prompt: int, response: int, samples: int) -> float:
    """Return the keys in attention per token of a micro-batch, where `samples` responses share each prompt.

    The prompt's tokens are in the run once. Among the keys they come once for the prompt and once for each response.
    """
    if samples == 1:
        return 1.0
    return (prompt + samples * (prompt + response)) / (prompt + samples * response)


INPUTS_AT_A_TIME = 3  # on the device, where they wait in host memory: one used, one coming, one going


def host_bytes(shape: ModelShape, computation: Computation, micro_batch: MicroBatch) -> int:
    """Return the bytes of blocks' inputs that wait in host memory for the backward pass."""
    return computation.width * shape.hidden_size * micro_batch.tokens * shape.layers if computation.on_host else 0


def kept_bytes(shape: ModelShape, computation: Computation, micro_batch: MicroBatch) -> int:
    """Return the bytes that wait for the backward pass when the forward pass of a micro-batch has ended."""
    w, tokens = computation.width, micro_batch.tokens
    if computation.checkpointing:
        layers = min(INPUTS_AT_A_TIME, shape.layers) if computation.on_host else shape.layers
        blocks = layers * w * shape.hidden_size
    else:
        tables = _tables(shape, computation, micro_batch.keys, micro_batch.padded)
        blocks = sum(layers * total(table) for layers, table in tables)
    of_responses = micro_batch.responses * total(response_table(shape, w))
    return tokens * (blocks + total(model_table(shape, w))) + of_responses


def _tables(shape: ModelShape, computation: Computation, keys: float, padded: float) -> list[tuple[int, list[Kept]]]:
    """Return how many blocks there are of each kind, and what one keeps."""
    attention, whole = layer_table(shape, computation, keys), keys * padded
    if shape.delta is not None:
        return [(shape.attention_layers, attention), (shape.delta.layers, delta_table(shape, computation, whole))]
    if (states := shape.mamba or shape.convolution) is None:
        return [(shape.attention_layers, attention)]
    mixed = (mamba_table if shape.mamba else convolution_table)(shape, computation, whole)
    if not shape.without_attention:  # beside such a layer the compiler sees but parts of a block
        parts = layer_table(shape, replace(computation, compiled=False), keys)
        return [(shape.layers, [*parts, *mixed])]
    if not shape.family.apart:
        behind = _behind_table(shape, computation)
        return [(shape.attention_layers, attention), (states.layers, [*mixed, *behind])]
    return _tables_apart(shape, computation, keys, mixed)


def _tables_apart(
    shape: ModelShape, computation: Computation, keys: float, mixed: list[Kept]
) -> list[tuple[int, list[Kept]]]:
    """Return them where a block has one norm, with its numbers in float32, and attention, Mamba 2 or an MLP."""
    assert shape.mamba is not None
    w, hidden = computation.width, shape.hidden_size
    norm, read = _norm_table(shape, FLOAT32, 1), Kept("norm's output", w * hidden, "input of what is behind it")
    attention = layer_table(replace(shape, intermediate_size=0), computation, keys)
    activated = Kept("activated", 2 * w * shape.intermediate_size, "its square; input of down")
    return [
        (shape.attention_layers, [read, *norm, *(kept for kept in attention if not kept.module.startswith("norms'"))]),
        (shape.mamba.layers, [*norm, *mixed]),
        (shape.without_attention - shape.mamba.layers, [read, *norm, activated]),
    ]


def fullest_block(shape: ModelShape, computation: Computation, keys: float = 1.0, padded: float = 1.0) -> int:
    """Return the bytes per token of the block that keeps the most, without checkpointing."""
    return max(total(table) for _, table in _tables(shape, computation, keys, padded))


def in_flight_bytes(shape: ModelShape, computation: Computation, micro_batch: MicroBatch) -> int:
    """Return what a block's backward pass needs besides: the gradients that are alive at once.

    These are the gradients inside its MLP and that of its norm. With checkpointing all that the block keeps is there
    again as well.
    """
    inner, copies = shape.intermediate_size, 0
    if (experts := shape.experts) is not None:
        inner, copies = experts.chosen * experts.inner + experts.shared, 2 * experts.chosen
    gradients = computation.width * (4 * inner + copies * shape.hidden_size) + 3 * FLOAT32 * shape.hidden_size
    fullest = fullest_block(shape, computation, micro_batch.keys, micro_batch.padded)
    again = fullest if computation.checkpointing else 0
    return micro_batch.tokens * (gradients + again)
