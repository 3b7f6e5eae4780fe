"""A checksum tells equal weights from those that differ in any bit or place; a comparison sees bits, not numbers."""

from __future__ import annotations

import pytest
import torch

from penstock.engines.weights.checksum import differs, range_sums, word_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 4096, 4099])
def test_any_changed_bit_changes_the_sum(numel: int, dtype: torch.dtype) -> None:
    """Also for sizes that are no whole words, and wherever in memory the values begin."""
    values = torch.randn(numel + 3).to(dtype)[3:]
    same = values.clone()
    assert word_sum(values) == word_sum(same)
    for place in {0, numel // 2, numel - 1} if numel else ():
        other = values.clone()
        other.view(torch.int32 if dtype is torch.float32 else torch.int16)[place] ^= 1
        assert word_sum(other) != word_sum(values)


@pytest.mark.parametrize(("numel", "size"), [(32, 8), (30, 8), (21, 7), (9, 4), (16, 8)])
def test_range_sums_are_the_sums_of_the_shards(numel: int, size: int) -> None:
    """Shards of one size, the last ones cut or empty. Control: shards that changed places are told apart."""
    values = torch.randn(numel).to(torch.bfloat16)
    shards = [values[rank * size : (rank + 1) * size] for rank in range(4)]
    sums = range_sums(values, size, 4)
    assert sums.tolist() == [word_sum(shard.clone()).item() for shard in shards]
    swapped = torch.cat([shards[1], shards[0], *shards[2:]])
    assert range_sums(swapped, size, 4).tolist() != sums.tolist()


def test_comparison_is_of_bits() -> None:
    """A weight that became NaN on both sides is equal, and zeros of different sign are not; strided views compare."""
    one = torch.tensor([[float("nan"), 0.0], [1.0, 2.0]])
    assert not differs(one, one.clone())
    assert differs(one, torch.tensor([[float("nan"), -0.0], [1.0, 2.0]]))
    assert not differs(one[:, :1], one.clone()[:, :1])


@pytest.mark.parametrize("begin", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_single_bit_is_seen_wherever_it_is(dtype: torch.dtype, begin: int) -> None:
    """Also in columns cut out of a matrix, whose words are as wide as their place in memory allows."""
    matrix = torch.arange(8 * 20).reshape(8, 20).to(dtype)
    columns, other = matrix[:, begin : begin + 8], matrix[:, begin : begin + 8].clone()
    assert not differs(columns, other)
    bits = other.view(torch.uint8)
    for row in range(bits.shape[0]):
        for byte in range(bits.shape[1]):
            bits[row, byte] ^= 1
            assert differs(columns, other)
            bits[row, byte] ^= 1
