"""The gradient of samples of several conversations is that of their paths one by one, each sampled token once.

The oracle is `tests.engines.unpacked`: every path by itself, PyTorch's attention, full logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.algorithms.aggregation import Denominators
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.commands.update import ActorLoss
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from penstock.engines.training.updates import actor_loss
from tests.engines.batches.path_rows import PathRows, rows_of_paths
from tests.engines.rows import LOSS
from tests.engines.shared_ranks import Shape
from tests.engines.unpacked import load_unpacked, row_logprobs

CPU = torch.device("cpu")
SHAPE = Shape("qwen2", tied=True)
FolderOf = Callable[[Shape], Path]
MAX_TOKENS = 50.0


@pytest.fixture(scope="module")
def made() -> PathRows:
    return rows_of_paths()


@torch.no_grad()
def test_log_probs_are_those_of_each_path_alone(made: PathRows, folder_of: FolderOf) -> None:
    """Control: a sample's tokens as one conversation, one path behind the other, have others."""
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPE), torch.float32, False)).eval()
    oracle = load_unpacked(folder_of(SHAPE))
    expected_T = torch.cat([row_logprobs(oracle, made.alone, path)[0] for path in range(len(made.sample_P))])
    found_T = policy(pack(made.samples, [0, 1, 2, 3], CPU), 1.0)[0]
    torch.testing.assert_close(found_T, expected_T, rtol=1e-5, atol=1e-5)
    chained_T = policy(pack(replace(made.samples, paths=None), [0, 1, 2, 3], CPU), 1.0)[0]
    assert float((chained_T - expected_T).abs().max()) > 1e-2


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_gradient_is_the_sum_over_paths(made: PathRows, folder_of: FolderOf, aggregation: str) -> None:
    """Summed by hand, path by path, with the weight that a token has in its sample, whose paths count as one sequence.

    It is the same in one micro-batch and in two. Controls: a second path whose prefix counts as well gives another;
    and so does, where sequences weigh alike, a path that counts as a sequence of its own.
    """
    samples, mask_T = made.samples, made.alone.mask.values_T.astype(np.float64)
    tokens_B = np.bincount(made.sample_P, [mask.sum() for mask in map(made.alone.mask.row, range(len(made.sample_P)))])
    weight_of = {
        "token-mean": [1 / tokens_B.sum()] * 4,
        "seq-mean-token-mean": [1 / tokens / 4 for tokens in tokens_B],
        "seq-mean-token-sum-norm": [1 / (4 * MAX_TOKENS)] * 4,
    }[aggregation]
    oracle = load_unpacked(folder_of(SHAPE))
    for path, sample in enumerate(made.sample_P):
        logprobs_T = row_logprobs(oracle, made.alone, path)[0]
        counted_T = made.alone.mask.row(path) * made.alone.columns["advantages"].row(path)
        loss = -(logprobs_T * torch.from_numpy(counted_T)).sum() * weight_of[sample]
        loss.backward()
    expected = _gradients(oracle)
    counts = Denominators(float(mask_T.sum()), 4.0, MAX_TOKENS)
    for micro_batches in ([[0, 1, 2, 3]], [[2], [3, 0, 1]]):
        found = _packed(folder_of(SHAPE), samples, micro_batches, aggregation, counts)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)

    unmasked, counted = _with_prefix_that_counts(made)
    wrong = [_packed(folder_of(SHAPE), unmasked, [[*range(9)]], aggregation, replace(counts, tokens=counted))]
    if aggregation == "seq-mean-token-mean":
        wrong.append(_packed(folder_of(SHAPE), made.alone, [[*range(9)]], aggregation, replace(counts, sequences=9.0)))
    for gradients in wrong:
        assert max(float((gradients[name] - expected[name]).abs().max()) for name in expected) > 1e-4


def _with_prefix_that_counts(made: PathRows) -> tuple[Rows, float]:
    """The paths as rows, of which the first branch has the turn before it behind its prompt once more."""
    prompt = made.alone.prompts.row(0)
    prompts, responses = (
        [column.row(row) for row in range(9)] for column in (made.alone.prompts, made.alone.responses)
    )
    masks, advantages = (
        [column.row(row) for row in range(9)] for column in (made.alone.mask, made.alone.columns["advantages"])
    )
    prefix = prompts[4][len(prompt) :]
    prompts[4], responses[4] = prompt, np.concatenate([prefix, responses[4]])
    masks[4] = np.concatenate([np.ones(len(prefix), np.uint8), masks[4]])
    advantages[4] = np.concatenate([np.full(len(prefix), 1.0, np.float32), advantages[4]])
    of = type(made.alone.prompts).of
    rows = Rows(of(prompts, np.int32), of(responses, np.int32), of(masks, np.uint8), {})
    rows = replace(rows, columns={"advantages": of(advantages, np.float32)})
    return rows, float(rows.mask.values_T.sum())


def _packed(
    folder: Path, rows: Rows, micro_batches: list[list[int]], aggregation: str, counts: Denominators
) -> dict[str, torch.Tensor]:
    lm = load_causal_lm(folder, torch.float32, False)
    policy = PackedPolicy(lm).train()
    of_batch = actor_loss(ActorLoss(**LOSS), aggregation, None, [], False)
    for index in micro_batches:
        of_batch(policy, pack(rows, index, CPU), counts)[0].backward()
    return _gradients(lm)


def _gradients(lm: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in lm.named_parameters() if parameter.grad is not None}
