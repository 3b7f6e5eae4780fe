"""Replayed routes: the library with the same experts forced gives the same log-probs and gradients, row by row.

The oracle weighs the forced experts by a softmax over their logits alone, and where a family does not divide by their
sum by how much of all probability they have. Suffixes: `_T` tokens of one row, `_TE` times all experts, `_TLK` times
layers times experts of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged, offsets_of
from penstock.benchmarks.workload.families import FAMILIES as TINY
from penstock.benchmarks.workload.families import write_family
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.families.routing import REPLAYED
from penstock.engines.families.table import family_of
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from tests.engines.rows import branched_rows, random_rows
from tests.engines.unpacked import load_unpacked, row_logprobs

CPU = torch.device("cpu")
LAYERS, EXPERTS, CHOSEN, UNKNOWN = 2, 4, 2, 255
DIVIDED = {"Mixtral": True, "OLMoE": False, "Qwen 2 MoE": False, "Qwen 3 MoE": False}  # by the sum of their weights
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Makes the folder of a tiny mixture."""
    return lambda name: write_family(name, tmp_path_factory.mktemp("mixture") / "model")


def with_routes(rows: Rows, choose: Callable[[int, int], np.ndarray]) -> Rows:
    """The rows with what `choose` gives for a row and its number of tokens, [T, L, K]."""
    lengths = rows.lengths_B.tolist()
    flat = [choose(row, length).astype(np.uint8).ravel() for row, length in enumerate(lengths)]
    return replace(rows, routes=Ragged(np.concatenate(flat), offsets_of(np.array([len(part) for part in flat]))))


def at_random(row: int, length: int) -> np.ndarray:
    """Two experts of the four for each token and layer; the last token's are not known."""
    random = np.random.default_rng(row)
    routes_TLK = random.random((length, LAYERS, EXPERTS)).argsort(-1)[:, :, :CHOSEN]
    routes_TLK[-1] = UNKNOWN
    return routes_TLK


def force(lm: Any, divided: bool, routes_TLK: np.ndarray) -> None:
    """Let the library's routers take these experts for the next row, and their own where none are known."""
    kind = lm.base_model._can_record_outputs["router_logits"].target_class
    for layer, router in enumerate(module for module in lm.modules() if isinstance(module, kind)):
        router.forward = partial(_forced, router, divided, torch.from_numpy(routes_TLK[:, layer].astype(np.int64)))


def _forced(router: Any, divided: bool, given_TK: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits_TE = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    experts_TK = torch.where(given_TK == UNKNOWN, logits_TE.topk(CHOSEN).indices, given_TK)
    chosen_TK = logits_TE.gather(-1, experts_TK)
    weights_TK = chosen_TK.softmax(-1)
    if not divided:
        weights_TK = weights_TK * (chosen_TK.logsumexp(-1) - logits_TE.logsumexp(-1)).exp()[:, None]
    return logits_TE, weights_TK, experts_TK


def own_routes(lm: Any, rows: Rows) -> Rows:
    """The rows with the routes that the library's routers choose, in the order of their numbers."""

    def choose(row: int, _: int) -> np.ndarray:
        tokens = torch.from_numpy(np.concatenate([rows.prompts.row(row), rows.responses.row(row)]).astype(np.int64))
        logits = lm(tokens[None], output_router_logits=True).router_logits
        return torch.stack([layer.topk(CHOSEN).indices.sort().values for layer in logits], 1).numpy()

    with torch.no_grad():
        return with_routes(rows, choose)


def gradients(policy: PackedPolicy, rows: Rows) -> dict[str, torch.Tensor]:
    """Those of the sum of all log-probs."""
    policy.zero_grad()
    policy(pack(rows, [*range(len(rows))], CPU), 1.0)[0].sum().backward()
    return {name: tensor.grad.clone() for name, tensor in policy.lm.named_parameters() if tensor.grad is not None}


@pytest.mark.parametrize("family", sorted(DIVIDED))
@pytest.mark.parametrize("recomputed", [False, True])
def test_it_is_the_library_with_the_same_experts_forced(family: str, recomputed: bool, mixture: FolderOf) -> None:
    """Log-probs and gradients, the routers' own among them. Control: every expert's number one higher."""
    folder, rows = mixture(family), with_routes(random_rows(6), at_random)
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, recomputed), replays=True).train()
    oracle = load_unpacked(folder).train()
    expected = []
    for row, length in enumerate(rows.lengths_B.tolist()):
        force(oracle, DIVIDED[family], at_random(row, length))
        expected.append(row_logprobs(oracle, rows, row)[0])
    torch.cat(expected).sum().backward()
    library = {name: tensor.grad for name, tensor in oracle.named_parameters() if tensor.grad is not None}
    found = gradients(policy, rows)
    assert found.keys() == library.keys()
    assert any("gate.weight" in name and gradient.abs().max() > 1e-2 for name, gradient in found.items())
    for name, gradient in library.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        logprobs_T = policy(pack(rows, [*range(len(rows))], CPU), 1.0)[0]
        torch.testing.assert_close(logprobs_T, torch.cat(expected).detach(), rtol=1e-5, atol=1e-5)
        others = with_routes(rows, lambda row, length: np.where((r := at_random(row, length)) == 255, r, (r + 1) % 4))
        shuffled_T = policy(pack(others, [*range(len(rows))], CPU), 1.0)[0]
        assert (shuffled_T - logprobs_T).abs().mean() > 0.05


@pytest.mark.parametrize("family", sorted(DIVIDED))
@pytest.mark.parametrize("recomputed", [False, True])
def test_where_own_and_replayed_agree_not_a_bit_differs(family: str, recomputed: bool, mixture: FolderOf) -> None:
    """Of log-probs, of figures and of gradients. Control: one route of another expert is counted, and changes them."""
    folder, rows = mixture(family), random_rows(6)
    policy = PackedPolicy(load_causal_lm(folder, torch.float32, recomputed), replays=True)
    agreeing = own_routes(load_unpacked(folder), rows)
    every = [*range(len(rows))]
    logprobs_T, _, *figures = policy(pack(rows, every, CPU), 1.0, None, True)
    replayed_T, _, mismatch, *replayed_figures = policy(pack(agreeing, every, CPU), 1.0, None, True)
    assert mismatch == 0
    assert torch.equal(logprobs_T, replayed_T)
    assert figures == replayed_figures
    own, replayed = gradients(policy, rows), gradients(policy, agreeing)
    assert all(torch.equal(own[name], replayed[name]) for name in own)
    assert agreeing.routes is not None
    changed = agreeing.routes.values_T.copy()
    at = (len(rows.prompts.row(0)) * LAYERS - 1) * CHOSEN  # last layer of the token that predicts the first response
    changed[at] = next(expert for expert in range(EXPERTS) if expert not in changed[at : at + CHOSEN])
    one_wrong = replace(agreeing, routes=Ragged(changed, agreeing.routes.offsets_B1))
    wrong_T, _, mismatch, *_ = policy(pack(one_wrong, every, CPU), 1.0, None, True)
    assert mismatch * len(changed) == pytest.approx(1)
    assert not torch.equal(wrong_T, logprobs_T)
    assert torch.equal(policy(pack(rows, every, CPU), 1.0)[0], logprobs_T)  # nothing is left of what was replayed


def test_tokens_that_rows_share_take_the_experts_of_the_first_that_knows_them() -> None:
    """Prompts and branches: one row for each token that is computed, the first; where that is its last, the next."""
    rows = branched_rows()
    number = with_routes(rows, lambda row, length: np.full((length, LAYERS, CHOSEN), row))
    whole = [[*rows.prompts.row(row), *rows.responses.row(row)] for row in range(len(rows))]

    def taken(rows: Rows, order: list[int]) -> list[int]:
        batch = pack(rows, order, CPU)
        assert batch.routes_NW is not None
        assert batch.routes_NW.shape == (len(batch.tokens_N), LAYERS * CHOSEN)
        return batch.routes_NW[:, 0].tolist()

    found = taken(number, [0, 1])
    shared = len(rows.prompts.row(0)) + 90
    assert found == [0] * len(whole[0]) + [1] * (len(whole[1]) - shared)
    # Row 5 ends where the others branch: of its last token they know more.

    def but_for_the_last(row: int, length: int) -> np.ndarray:
        routes_TLK = np.full((length, LAYERS, CHOSEN), row)
        routes_TLK[-1] = UNKNOWN
        return routes_TLK

    unknown = with_routes(rows, but_for_the_last)
    found = taken(unknown, [5, 0])
    assert found[: len(whole[5])] == [5] * (len(whole[5]) - 1) + [0]
    assert found[len(whole[5]) :] == [0] * (len(whole[0]) - len(whole[5]) - 1) + [-1]


def test_families_whose_routes_are_replayed_are_those_above() -> None:
    """Each has a row whose experts a reshard compares."""
    assert sorted(TINY[name][0] for name in DIVIDED) == sorted(REPLAYED)
    assert all(family_of(name).experts for name in REPLAYED)
