"""Model FLOPs of packed forward and backward passes and of generation, and what a GPU could do: together the MFU.

Model FLOPs are those that the mathematics needs, whatever the code does (PaLM, arXiv 2204.02311, appendix B): 2 per
parameter and token in every matrix, twice that again for the backward pass. So recomputation, padding and causal
blocks that a kernel computes in vain earn no credit. Differences to the usual "6 x parameters x tokens":

- attention is counted by the pairs of tokens that see each other, from each sequence's own length;
- the language head is counted for response tokens alone, since only those get logits;
- a prompt is counted once for all its samples: its hidden states do not depend on what follows;
- with LoRA, frozen matrices get no gradient of their own: they count once in the backward pass, not twice;
- layers that carry a state are counted by their recurrence, and convolutions before it as a matrix;
- products in FP8 count as all others, and take half as long at their peak (`bfloat16_flops`);
- the embedding is a lookup, and norms, activations and rotary embeddings are no matrices: neither counts.

Lengths are arrays with one entry per row (`_B`). Of experts those count that a token meets. Left out:
architectures that are neither dense nor such a mixture (`ModelShape.explained`), the optimizer step.
"""

from __future__ import annotations

import re

import numpy as np

from penstock.engines.families.shape import ModelShape

BACKWARD = 2  # a matrix product's gradient is two products of its size
# Dense bfloat16 peaks in 1e12 FLOP/s by NVIDIA's data sheets and whitepapers, without sparsity (which doubles what
# the sheets print in large type) and with float32 accumulation. The first pattern that matches a name counts.
BF16_TERAFLOPS = (
    (r"GB[23]00", 2500.0),  # GB200 and GB300 NVL72 data sheets: 5 PFLOP/s per GPU with sparsity
    (r"B[23]00", 2250.0),  # HGX B200 and B300 data sheets: 36 PFLOP/s per 8 GPUs with sparsity
    (r"H[12]00 NVL", 835.0),  # H100 NVL and H200 NVL data sheets: 1,671 with sparsity
    (r"H100 PCIe", 756.0),  # H100 data sheet: 1,513 with sparsity
    (r"H[12]00|GH200", 989.0),  # H100 SXM, H200 SXM and GH200 data sheets: 1,979 with sparsity
    (r"H800", 989.0),  # an H100 SXM with narrower links
    (r"A[18]00", 312.0),  # A100 data sheet; an A800 is one with narrower links
    (r"A30", 165.0),  # A30 data sheet
    (r"A40", 149.7),  # A40 data sheet
    (r"A10", 125.0),  # A10 data sheet (an A10G is another chip)
    (r"L40S", 362.0),  # L40S data sheet
    (r"L40", 181.0),  # L40 data sheet
    (r"L4", 121.0),  # L4 data sheet: 242 with sparsity
    (r"RTX 6000 Ada", 364.2),  # RTX 6000 Ada data sheet: 728.5 with sparsity
    (r"RTX A6000", 154.8),  # RTX A6000 data sheet: 309.7 with sparsity
    (r"RTX 5090$", 209.5),  # RTX Blackwell whitepaper
    (r"RTX 4090$", 165.2),  # Ada whitepaper (a Laptop, D or Ti is another chip)
    (r"RTX 3090$", 71.0),  # GA102 whitepaper
)
FP8_FASTER = 2  # Hopper data sheets: a dense FP8 peak of twice bfloat16's
A_PART = r"MIG|-\d+[ABCQ]$"  # a slice, or a virtual GPU


def peak_flops(gpu_name: str, dtype: str) -> float | None:
    """Return the FLOP/s that a GPU of this name reaches at best in dense matrix products of `dtype`.

    None where that is not known: another dtype than bfloat16 and float16, a GPU that is not listed, a part of one.
    """
    if dtype not in ("bfloat16", "float16") or re.search(A_PART, gpu_name):
        return None
    for pattern, teraflops in BF16_TERAFLOPS:
        if re.search(rf"\b(?:{pattern})\b", gpu_name):
            return teraflops * 1e12
    return None


def causal_pairs(lengths_B: np.ndarray, window: int = 0) -> float:
    """Pairs (token, token that it sees) in sequences of these lengths; `window` limits how many it sees, 0 does not."""
    lengths_B = np.asarray(lengths_B, np.float64)
    pairs = float((lengths_B * (lengths_B + 1) / 2).sum())
    if not window:
        return pairs
    beyond_B = np.maximum(lengths_B - window, 0)  # a token after the window misses one more than the one before it
    return pairs - float((beyond_B * (beyond_B + 1) / 2).sum())


def attention_flops(shape: ModelShape, lengths_B: np.ndarray) -> float:
    """Forward FLOPs of scores and weighted sums over whole sequences, all layers with attention."""
    full = shape.attention_layers - shape.windowed_layers
    pairs = full * causal_pairs(lengths_B)
    if shape.windowed_layers:
        pairs += shape.windowed_layers * causal_pairs(lengths_B, shape.window)
    return 2.0 * shape.heads * (shape.head_size + shape.value_size) * pairs


def state_flops(shape: ModelShape, tokens: float) -> float:
    """Forward FLOPs of recurrences: products of a state's size for a token, whatever a kernel computes in chunks.

    A state of the gated delta rule is read by a key, added to, and read by a query (arXiv 2412.06464), one of Mamba 2
    is added to and read (arXiv 2405.21060).
    """
    if (states := shape.states) is None:
        return 0.0
    return (3 if shape.delta is not None else 2) * 2.0 * states.layers * states.state * tokens


def forward_flops(
    shape: ModelShape,
    prompt_B: np.ndarray,
    response_B: np.ndarray,
    *,
    scalar_head: bool,
    shared_B: np.ndarray | None = None,
    adapters: int = 0,
) -> float:
    """FLOPs of one forward pass over prompts with their responses.

    Args:
        prompt_B: prompt tokens per row; response_B: response tokens per row.
        scalar_head: a critic's head of one value per response token, not a language head.
        shared_B: first tokens of a row that are computed for another one as well, and counted there; None: all differ.
        adapters: parameters of LoRA's adapters that a token meets.
    """
    shared_B = np.zeros_like(prompt_B) if shared_B is None else shared_B
    own_B, outputs = prompt_B + response_B - shared_B, 1 if scalar_head else shape.vocabulary
    blocks = _block_flops(shape, own_B, shared_B) + _adapter_flops(adapters, own_B)
    return blocks + _head_flops(shape, _own_responses(prompt_B, response_B, shared_B), outputs)


def training_flops(
    shape: ModelShape,
    prompt_B: np.ndarray,
    response_B: np.ndarray,
    *,
    scalar_head: bool,
    shared_B: np.ndarray | None = None,
    adapters: int = 0,
) -> float:
    """FLOPs of one forward and backward pass over the rows; recomputed activations earn nothing.

    With adapters the model's own weights rest: a gradient goes through them, and none is made of them.
    """
    whole = (1 + BACKWARD) * forward_flops(
        shape, prompt_B, response_B, scalar_head=scalar_head, shared_B=shared_B, adapters=adapters
    )
    if not adapters:
        return whole
    shared_B = np.zeros_like(prompt_B) if shared_B is None else shared_B
    resting = _matrix_flops(shape, prompt_B + response_B - shared_B)
    if not scalar_head:  # a critic's head is trained
        resting += _head_flops(shape, _own_responses(prompt_B, response_B, shared_B), shape.vocabulary)
    return whole - resting


def fp8_flops(
    shape: ModelShape, prompt_B: np.ndarray, response_B: np.ndarray, *, shared_B: np.ndarray, passes: int
) -> float:
    """FLOPs that FP8 products do of `training_flops` (`passes` 2: outputs, inputs' gradients) or `forward_flops` (1).

    These are those of the linear layers of attention and MLPs (penstock/engines/kernels/fp8_blocks.py).
    """
    return 2.0 * passes * shape.block_matrices * float((prompt_B + response_B - shared_B).sum())


def bfloat16_flops(flops: float, in_fp8: float) -> float:
    """Return the FLOPs of bfloat16 that take as long at its peak as `flops` do, `in_fp8` of them at that of FP8."""
    return flops - in_fp8 + in_fp8 / FP8_FASTER


def generation_flops(shape: ModelShape, prompt_B: np.ndarray, response_B: np.ndarray, samples: int) -> float:
    """FLOPs of generating the responses: each prompt read once for its `samples` rows, then token after token.

    Args:
        prompt_B, response_B: tokens per row, the rows of a prompt next to each other.
        samples: rows per prompt.

    The last token of a response is sampled and not read; the head is needed once per token that is sampled.
    """
    read_B = np.maximum(response_B - 1, 0)
    shared_B = np.where(np.arange(len(prompt_B)) % samples, prompt_B, 0)
    blocks = _block_flops(shape, prompt_B + read_B - shared_B, shared_B)
    return blocks + _head_flops(shape, response_B, shape.vocabulary)


def _block_flops(shape: ModelShape, own_B: np.ndarray, shared_B: np.ndarray) -> float:
    """All blocks: of each row its own tokens, after those that it shares."""
    attention = attention_flops(shape, shared_B + own_B) - attention_flops(shape, shared_B)
    return _matrix_flops(shape, own_B) + attention + state_flops(shape, float(own_B.sum()))


def _own_responses(prompt_B: np.ndarray, response_B: np.ndarray, shared_B: np.ndarray) -> np.ndarray:
    """Response tokens that no other row shares."""
    return response_B - np.maximum(shared_B - prompt_B, 0)


def _matrix_flops(shape: ModelShape, own_B: np.ndarray) -> float:
    return 2.0 * shape.matrices_per_token * float(own_B.sum())


def _adapter_flops(adapters: int, own_B: np.ndarray) -> float:
    return 2.0 * adapters * float(own_B.sum())


def _head_flops(shape: ModelShape, response_B: np.ndarray, outputs: int) -> float:
    return 2.0 * shape.hidden_size * outputs * float(response_B.sum())
