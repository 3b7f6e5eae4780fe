"""A model that ranks cannot share is refused before anything starts, vLLM's ranks and the trainer's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model.parallel import check_expert_parallel, check_heads, check_tensor_parallel
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.model import TinyModel
from penstock.engines.families.shape import ExpertSizes
from penstock.engines.families.tiny import tiny_shape

SHAPE = replace(tiny_shape(TinyModel()), heads=8, kv_heads=2, intermediate_size=96)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_even_shares_pass(ranks: int) -> None:
    """Also more ranks than key/value heads, which several ranks then hold."""
    check_tensor_parallel(ranks, SHAPE)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (3, {}, "8 heads, 2 kv_heads"),
        (4, {"intermediate_size": 98}, "98 intermediate_size"),
        (4, {"kv_heads": 6}, "6 kv_heads"),
    ],
)
def test_uneven_shares_are_refused_by_name(ranks: int, sizes: dict[str, int], message: str) -> None:
    """vLLM would fail in the middle of a start."""
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(ranks, replace(SHAPE, **sizes))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_are_shared_out_for_attention(ranks: int) -> None:
    """Also more ranks than key/value heads, and an MLP of any size, which no rank has a part of."""
    check_heads("actor", ranks, replace(SHAPE, intermediate_size=97))


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [(3, {}, r"critic\.sequence_parallel=3: the model's 8 heads, 2 kv_heads"), (4, {"kv_heads": 6}, "'s 6 kv_heads")],
)
def test_heads_that_are_not_shared_out_evenly_are_refused(ranks: int, sizes: dict[str, int], message: str) -> None:
    """An exchange would fail in the middle of a training's first pass."""
    with pytest.raises(UserError, match=message):
        check_heads("critic", ranks, replace(SHAPE, **sizes))


def test_micro_batches_of_a_mixture_are_not_shared_out() -> None:
    """Its figures of the experts are of a rank's own tokens. Control: on one rank it is trained."""
    mixture = replace(SHAPE, experts=ExpertSizes(count=4, chosen=2, inner=32))
    check_heads("actor", 1, mixture)
    with pytest.raises(UserError, match=r"actor\.sequence_parallel=2 is not for mixtures of experts"):
        check_heads("actor", 2, mixture)


def test_experts_are_shared_out_evenly_over_ranks_of_the_actors_group(tmp_path: Path) -> None:
    """Controls: numbers that divide both, and a model without experts whose ranks share out none."""
    dense, mixture = (str(write_family(name, tmp_path / name)) for name in ("Qwen 3", "Mixtral"))

    def check(count: int, ranks: int, path: str = mixture, **model: Any) -> None:
        tree = {"model": {"path": path, **model}, "actor": {"expert_parallel": count}}
        check_expert_parallel(TrainConfig.model_validate(tree), ranks)

    check(2, 4)
    check(4, 4)
    check(1, 3, dense)
    with pytest.raises(UserError, match="actor.expert_parallel=2 has no effect: the model has no experts"):
        check(2, 2, dense)
    with pytest.raises(UserError, match="actor.expert_parallel=2 does not divide the 3 ranks of the actor's group"):
        check(2, 3)
    with pytest.raises(UserError, match="actor.expert_parallel=3: the 4 experts of a layer cannot be shared out"):
        check(3, 3)
    with pytest.raises(UserError, match="actor.expert_parallel=2 is not for a model with code of its own"):
        check(2, 2, trust_remote_code=True, code={"modeling_own.py": "0" * 64})
