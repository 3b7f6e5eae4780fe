"""Proof that weights arrived: sums of their bits where they come from and where they are, and exact comparison.

A sum reads eight bytes as one integer and wraps around, so it is exact, the same in any order of summation, and costs
one pass over the memory. It does not see two words that changed places inside one summed range; ranges are single
shards and buckets, and which range goes where is decided by slices that are tested against vLLM's own loader.

Results stay on the device: the caller waits once, for all of them.
"""

from __future__ import annotations

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_CONVERTED_AT_ONCE = 1 << 24  # narrower words become 64 bits before they are added


def word_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a contiguous tensor's words modulo 2^64, as int64 without dimensions."""
    words = _words(values.reshape(-1), values.numel())
    if words.dtype is torch.int64:
        return words.sum()
    parts = [chunk.sum(dtype=torch.int64) for chunk in words.split(_CONVERTED_AT_ONCE)]
    return torch.stack(parts).sum() if parts else words.new_zeros((), dtype=torch.int64)


def range_sums(flat: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Return `word_sum` of `count` consecutive ranges of `size` elements, the last ones cut or empty; [count]."""
    if flat.numel() == size * count and size * flat.element_size() % 8 == 0:
        return _words(flat, size).view(count, -1).sum(1)
    ends = [min(number * size, flat.numel()) for number in range(count + 1)]
    return torch.stack([word_sum(flat[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)])


def differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether any bit of two tensors of one shape differs, as bool without dimensions.

    They are read in the widest words that both allow, since the comparison writes a result for each word.
    """
    dtype = next(dtype for width, dtype in _WORDS if _reads(one, width) and _reads(other, width))
    return (one.view(dtype) != other.view(dtype)).any()


def _reads(values: torch.Tensor, width: int) -> bool:
    """Whether a tensor, contiguous or not, can be viewed in words of `width` bytes."""
    size = values.element_size()
    if width <= size or not values.ndim:
        return width == size
    steps = (values.shape[-1], values.storage_offset(), *values.stride()[:-1])
    return values.stride(-1) == 1 and all(step * size % width == 0 for step in steps)


def _words(flat: torch.Tensor, of: int) -> torch.Tensor:
    """View a flat tensor in the widest words that ranges of `of` elements are made of."""
    width, dtype = next((width, dtype) for width, dtype in _WORDS if of * flat.element_size() % width == 0)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()
    return flat.view(dtype)
