"""Layers that carry a state from token to token: packed rows are the library's row by row, and never one run.

Rows of two prompts, two of each, of different lengths: what they share is computed once by all other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import FAMILIES, write_family
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.batches.shares import RankSet
from penstock.engines.families.table import family_of
from penstock.engines.kernels import mixers
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedCritic, PackedPolicy, compile_blocks
from tests.engines.rows import random_rows
from tests.engines.unpacked import load_unpacked, row_logprobs, row_values

CPU = torch.device("cpu")
WITH_STATES = [name for name, (model_type, _) in FAMILIES.items() if family_of(model_type).mixers]
SAME = ("Qwen 3.5 MoE",)  # of which another has the same mixer, and is taken in its place


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SAME)) for name in WITH_STATES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny model of each such family."""
    yield write_family(request.param, tmp_path_factory.mktemp("model"))


def _policy(folder: Path, checkpointing: bool = False) -> PackedPolicy:
    policy: PackedPolicy = PackedPolicy(load_causal_lm(folder, torch.float32, checkpointing))
    return policy.train(checkpointing)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _library(folder: Path, rows: Rows, gradients: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs_T of each row alone, and the gradients of their mean."""
    lm = load_unpacked(folder)
    logprobs_T = torch.cat([row_logprobs(lm, rows, row)[0] for row in range(len(rows))])
    if gradients:
        logprobs_T.mean().backward()
    return logprobs_T.detach(), _gradients(lm)


def test_packed_rows_and_their_gradients_are_those_of_each_row_alone(folder: Path) -> None:
    """Two micro-batches, both forward before either goes backward: a block that runs again is in the one that it was.

    Control: as one run, with the library's own classes, log-probs are others.
    """
    rows, policy = random_rows(4, samples=2), _policy(folder, checkpointing=True)
    expected_T, gradients = _library(folder, rows)
    batches = [pack(rows, [0, 1], CPU), pack(rows, [2, 3], CPU)]
    assert all(batch.layout.shared is not None for batch in batches)
    logprobs_T = torch.cat([policy(batch, 1.0)[0] for batch in batches])
    logprobs_T.mean().backward()
    torch.testing.assert_close(logprobs_T.detach(), expected_T, rtol=1e-5, atol=1e-5)
    ours = _gradients(policy.lm)
    assert ours.keys() == gradients.keys()
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    assert torch.cat([(ours[name] - value).flatten() for name, value in gradients.items()]).norm() < 1e-5 * norm
    for module in list(policy.lm.modules()):
        if type(module).__module__ == mixers.__name__:
            module.__class__ = type(module).__base__  # the library's own
    with torch.no_grad():
        as_one_T = torch.cat([policy(batch, 1.0)[0] for batch in batches])
    assert (as_one_T - expected_T).abs().max() > 1e-2


@torch.no_grad()
def test_values_of_a_critic_are_those_of_each_row_alone(folder: Path) -> None:
    """Its head is drawn: it starts at zero. Control: with the library's own classes, as one run, they are others."""
    rows, critic = random_rows(4, samples=2), PackedCritic(load_causal_lm(folder, torch.float32, False)).eval()
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    batch, lm = pack(rows, [0, 1, 2, 3], CPU), load_unpacked(folder)
    expected_T = torch.cat([row_values(lm, critic.head, rows, row) for row in range(len(rows))])
    torch.testing.assert_close(critic(batch), expected_T, rtol=1e-5, atol=1e-5)
    for module in list(critic.modules()):
        if type(module).__module__ == mixers.__name__:
            module.__class__ = type(module).__base__
    assert (critic(batch) - expected_T).abs().max() > 1e-2


@torch.no_grad()
def test_branches_of_a_response_carry_the_state_of_what_they_share(folder: Path) -> None:
    """Three responses that part after 66 and 70 tokens, in one run. Control: the run is shorter than the rows."""
    trunk = [3 + number * number % 60 for number in range(74)]
    responses = [trunk, [*trunk[:66], 2, 41, 42, 43], [*trunk[:70], 2, 31]]
    rows = _rows([[3, 4, 5, 6]] * 3, responses)
    batch = pack(rows, [0, 1, 2], CPU)
    assert batch.branched == 66 + 70 and len(batch.tokens_N) == int(rows.lengths_B.sum()) - 2 * 4 - batch.branched
    expected_T, _ = _library(folder, rows, gradients=False)
    torch.testing.assert_close(_policy(folder)(batch, 1.0)[0], expected_T, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_blocks_share_compiled_code_whatever_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks of two kinds, rows of other lengths each time: three pieces, since a mixer parts its block in two.

    With the numbers of blocks that are not compiled. Control: at first there is none.
    """
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    kind, settings = FAMILIES["Qwen 3.5"]
    deep = {**settings, "num_hidden_layers": 8, "layer_types": settings["layer_types"] * 4}
    monkeypatch.setitem(FAMILIES, "Qwen 3.5", (kind, deep))
    folder = write_family("Qwen 3.5", tmp_path)
    plain, compiled = _policy(folder, checkpointing=True), _policy(folder, checkpointing=True)
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=count))
    compile_blocks(compiled.lm)
    torch._dynamo.reset()
    found = []
    for seed in range(3):
        batch = pack(random_rows(5, seed=seed), list(range(5)), CPU)
        logprobs_T, expected_T = compiled(batch, 1.0)[0], plain(batch, 1.0)[0]
        torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-5, atol=1e-5)
        logprobs_T.mean().backward()
        found.append(len(graphs))
    assert found == [3, 3, 3]


@torch.no_grad()
def test_rows_of_other_lengths_are_padded_to_less_than_twice_their_chunks(folder: Path) -> None:
    """One of 180 tokens beside short ones. Control: the groups, of which one alone would have six of 180."""
    random = np.random.default_rng(3)
    responses = [random.integers(2, 60, length).tolist() for length in (20, 170, 7, 31, 90, 12)]
    rows = _rows([random.integers(2, 60, 10).tolist() for _ in responses], responses)
    batch = pack(rows, list(range(6)), CPU)
    groups = batch.layout.row_groups.groups
    assert [(group.rows, group.longest) for group in groups] == [(4, 41), (1, 100), (1, 180)]
    expected_T, _ = _library(folder, rows, gradients=False)
    torch.testing.assert_close(_policy(folder)(batch, 1.0)[0], expected_T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_runs_of_several_ranks_are_refused(folder: Path) -> None:
    """By the layers themselves. Control: the same rows on one rank are computed."""
    batch, policy = pack(random_rows(2), [0, 1], CPU), _policy(folder)
    policy(batch, 1.0)
    in_shares = pack(random_rows(2), [0, 1], CPU, RankSet(2, 0, None))
    with pytest.raises(UserError, match="of which ranks cannot compute parts"):
        policy.hidden(in_shares)


def _rows(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    tokens, masks = Ragged.of(responses, np.int32), [np.ones(len(response)) for response in responses]
    return Rows(Ragged.of(prompts, np.int32), tokens, Ragged.of(masks, np.uint8), {})
