"""Aggregation: a loss that does not depend on how a mini-batch was cut.

Invariant: the shares of any split into micro-batches add up to the loss of the whole, and so do their gradients.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.algorithms.aggregation import AGGREGATIONS, Denominators, aggregate, weight_of_sums

# Rows of 2, 0, 3 and 1 tokens. The third is multi-turn, the fourth is fully masked.
LOSS_T = torch.tensor([1.0, 3.0, 4.0, 100.0, 6.0, 50.0], dtype=torch.float64)
MASK_T = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
OFFSETS_B1 = torch.tensor([0, 2, 2, 5, 6])
COUNTS = Denominators(tokens=4, sequences=2, max_tokens=8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 3 + 4 + 6) / 4),
        ("token-sum", 1 + 3 + 4 + 6),
        ("seq-mean-token-sum", ((1 + 3) + (4 + 6)) / 2),
        ("seq-mean-token-mean", ((1 + 3) / 2 + (4 + 6) / 2) / 2),
        ("seq-mean-token-sum-norm", ((1 + 3) + (4 + 6)) / (2 * 8)),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    assert aggregate(LOSS_T, MASK_T, OFFSETS_B1, mode, COUNTS).item() == expected


def mini_batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Denominators]:
    """Ragged rows of 0 to 9 tokens with random masks; the last row is fully masked."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(0, 10, (rows,), generator=generator)
    lengths_B[2], lengths_B[-1] = 0, 4
    offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    loss_T = torch.randn(int(offsets_B1[-1]), generator=generator, dtype=torch.float64)
    mask_T = (torch.rand(loss_T.shape, generator=generator) < 0.7).double()
    mask_T[-4:] = 0
    counted_B = [mask_T[start:end].sum().item() for start, end in itertools.pairwise(offsets_B1.tolist())]
    return loss_T, mask_T, offsets_B1, Denominators(sum(counted_B), sum(count > 0 for count in counted_B), 10)


def looped(mode: str) -> float:
    """The definition, row by row over a padded grid, without any of the code under test."""
    loss_T, mask_T, offsets_B1, counts = mini_batch()
    sums, means = [], []
    for start, end in itertools.pairwise(offsets_B1.tolist()):
        row = [0.0] * 10
        row[: end - start] = (loss_T[start:end] * mask_T[start:end]).tolist()
        counted = mask_T[start:end].sum().item()
        if counted:
            sums.append(sum(row))
            means.append(sum(row) / counted)
    return {
        "token-mean": sum(sums) / mask_T.sum().item(),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-mean": sum(means) / len(means),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / counts.max_tokens,
    }[mode]


def shares(mode: str, boundaries: list[int], counts: Denominators) -> list[torch.Tensor]:
    """The share of each micro-batch; boundaries are row indices."""
    loss_T, mask_T, offsets_B1, _ = mini_batch()
    spans = []
    for first, last in itertools.pairwise(boundaries):
        start, end = int(offsets_B1[first]), int(offsets_B1[last])
        spans.append((loss_T[start:end], mask_T[start:end], offsets_B1[first : last + 1] - start))
    return [aggregate(*span, mode, counts) for span in spans]


SPLITS = [[0, 12], [0, 1, 12], [0, 2, 3, 7, 11, 12], list(range(13)), [0, 6, 6, 12]]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("boundaries", SPLITS, ids=str)
def test_shares_add_up_whatever_the_split(mode: str, boundaries: list[int]) -> None:
    """Also with micro-batches that hold no token, or no row."""
    counts = mini_batch()[3]
    assert abs(sum(share.item() for share in shares(mode, boundaries, counts)) - looped(mode)) < 1e-12


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradients_add_up_whatever_the_split(mode: str) -> None:
    loss_T, mask_T, offsets_B1, counts = mini_batch()
    gradients = []
    for boundaries in SPLITS:
        leaf_T = loss_T.clone().requires_grad_()
        for first, last in itertools.pairwise(boundaries):
            start, end = int(offsets_B1[first]), int(offsets_B1[last])
            rows_B1 = offsets_B1[first : last + 1] - start
            aggregate(leaf_T[start:end], mask_T[start:end], rows_B1, mode, counts).backward()
        gradients.append(leaf_T.grad)
    assert gradients[0].abs().sum() > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-12)


def test_control_local_means_depend_on_the_split() -> None:
    """Negative control: dividing by the micro-batch's own tokens, then averaging, is not the loss."""
    loss_T, mask_T, offsets_B1, counts = mini_batch()
    boundaries = [0, 1, 12]
    local_means = []
    for first, last in itertools.pairwise(boundaries):
        span = slice(int(offsets_B1[first]), int(offsets_B1[last]))
        tokens = mask_T[span].sum().item()
        own = Denominators(tokens, counts.sequences, counts.max_tokens)
        rows_B1 = offsets_B1[first : last + 1] - span.start
        local_means.append(aggregate(loss_T[span], mask_T[span], rows_B1, "token-mean", own))
    assert abs(sum(local_means).item() / len(local_means) - looped("token-mean")) > 1e-3


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_tokens_and_fully_masked_rows_change_nothing(mode: str) -> None:
    changed_T = torch.where(MASK_T > 0, LOSS_T, -7.0)
    first = aggregate(LOSS_T, MASK_T, OFFSETS_B1, mode, COUNTS)
    assert torch.equal(first, aggregate(changed_T, MASK_T, OFFSETS_B1, mode, COUNTS))
    without_last_row = aggregate(LOSS_T[:5], MASK_T[:5], OFFSETS_B1[:4], mode, COUNTS)
    assert torch.equal(first, without_last_row)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradcheck(mode: str) -> None:
    leaf_T = LOSS_T.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, MASK_T, OFFSETS_B1, mode, COUNTS), (leaf_T,))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_shares_may_be_taken_before_the_counts_are_known(mode: str) -> None:
    """Weighed with them afterwards they are the loss. Control: without the weight most are not."""
    loss_T, mask_T, offsets_B1, counts = mini_batch()
    early = aggregate(loss_T, mask_T, offsets_B1, mode, Denominators(1, 1, counts.max_tokens)).item()
    assert early * weight_of_sums(mode, counts) == pytest.approx(looped(mode))
    assert (early == pytest.approx(looped(mode))) == (mode == "token-sum")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; there are token-mean"):
        aggregate(LOSS_T, MASK_T, OFFSETS_B1, "mean", COUNTS)


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_mini_batch_with_nothing_counted_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="has to be skipped"):
        Denominators(*counts)
