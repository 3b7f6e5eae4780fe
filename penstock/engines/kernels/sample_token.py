"""Samples a token from each row of logits on a GPU, with its log-prob, reading them once.

vLLM's kernel adds noise to every logit and takes the largest: a random number for each of 150,000 entries. Here one
number per row picks the token, by the running sum of the probabilities, in two kernels: sums of blocks, then the block
in which the number falls and the place in it. The distribution is the same, softmax of the logits. Weights are float32,
as softmax's are; they are added up, and compared with the number, in double precision. What they add up to is what the
token's log-prob needs beside its logit, so that costs nothing: vLLM reads the logits three times more for it.

The token depends on a request's seed, on its position and on its logits alone, as vLLM's does: on no other
row, nor on how many there are.

Suffixes: `_B` rows, `_V` vocabulary, `_R` requests, `_K` blocks of a row.
Left out: temperature, top-k and top-p, which vLLM has applied to the logits; a token that they exclude is -inf there.
Imported on GPUs alone (and by tests, with Triton's interpreter).
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

BLOCK = 2048  # logits


def sample(
    logits_BV: torch.Tensor,
    requests_B: torch.Tensor,
    temperatures_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token per row and its log-prob in softmax(logits), int64 and float32, each of shape (rows,).

    The token is sampled from softmax(logits), or the likeliest where the temperature is 0.

    Args:
        logits_BV: any floating type, rows contiguous; divided by the temperature already.
        requests_B: a row's place in the next two; below 0 where nobody looks at the token.
        temperatures_R: float32.
        seeds_R: int64.
        positions_B: int64, of the token within its request.
    """
    rows, vocabulary = logits_BV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    most_BK = torch.empty(rows, blocks, dtype=torch.float32, device=logits_BV.device)
    sums_BK = torch.empty_like(most_BK)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _sum_blocks[(rows, blocks)](logits_BV, logits_BV.stride(0), most_BK, sums_BK, vocabulary, blocks, BLOCK=BLOCK)
    _pick[(rows,)](
        logits_BV,
        logits_BV.stride(0),
        most_BK,
        sums_BK,
        requests_B.contiguous(),
        temperatures_R,
        seeds_R,
        positions_B.contiguous(),
        tokens_B,
        logprobs_B,
        vocabulary,
        blocks,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
    )
    return tokens_B, logprobs_B


@triton.jit
def _sum_blocks(logits, stride, most_BK, sums_BK, vocabulary, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each block of each row: the largest logit, and the sum of exp(logit - it)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    most = tl.max(found, axis=0)
    weights = tl.where(found == float("-inf"), 0.0, tl.exp(found - most))
    tl.store(most_BK + row * blocks + block, most)
    tl.store(sums_BK + row * blocks + block, tl.sum(weights, axis=0))


# Each pointer is a parameter of its own, as kernels of Triton take them.
@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits,
    stride,
    most_BK,
    sums_BK,
    requests_B,
    temperatures_R,
    seeds_R,
    positions_B,
    tokens_B,
    logprobs_B,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the block and the place in it at which the running sum of a row passes its random share of the whole."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_B + row).to(tl.int64)
    known = request >= 0
    temperature = tl.load(temperatures_R + request, mask=known, other=0.0)

    numbers = tl.arange(0, BLOCKS)
    most = tl.load(most_BK + row * blocks + numbers, mask=numbers < blocks, other=float("-inf"))
    sums = tl.load(sums_BK + row * blocks + numbers, mask=numbers < blocks, other=0.0)
    top, likeliest = tl.max(most, axis=0, return_indices=True)
    weights = tl.where(sums > 0.0, sums.to(tl.float64) * tl.exp((most - top).to(tl.float64)), 0.0)
    seed, position = tl.load(seeds_R + request, mask=known, other=0), tl.load(positions_B + row)
    total = tl.sum(weights, axis=0)
    target = _uniform(seed, position) * total
    passed = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    block = tl.where(temperature == 0.0, likeliest, tl.minimum(passed, blocks - 1))

    base = tl.sum(tl.where(numbers == block, most, 0.0), axis=0)
    before = tl.sum(tl.where(numbers < block, weights, 0.0), axis=0)
    rest = (target - before) / tl.exp((base - top).to(tl.float64))
    places = tl.arange(0, BLOCK)
    at = block * BLOCK + places
    found = tl.load(logits + row * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    inside = tl.where(found == float("-inf"), 0.0, tl.exp(found - base))
    sampled = tl.sum((tl.cumsum(inside.to(tl.float64), axis=0) <= rest).to(tl.int32), axis=0)
    last = tl.max(tl.where(inside > 0.0, places, 0), axis=0)  # rounding may leave a rest behind the last one
    greedy = tl.argmax(found, axis=0)
    place = tl.where(temperature == 0.0, greedy, tl.minimum(sampled, last))
    logit = tl.sum(tl.where(places == place, found, 0.0), axis=0)
    tl.store(tokens_B + row, block * BLOCK + place)
    tl.store(logprobs_B + row, ((logit - top).to(tl.float64) - tl.log(total)).to(tl.float32))


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """A number from 0 to below 1 with 53 random bits (Philox 4x32-10)."""
    low, high, _, _ = tl.randint4x(seed, position)
    bits = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
