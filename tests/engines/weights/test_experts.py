"""Experts that lie on several ranks reach vLLM whole, and files in the library's shape. Real engines, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.benchmarks.workload.families import write_family
from tests.engines.shared_ranks import Ranks
from tests.engines.weights.test_broadcast import Apart
from tests.engines.weights.test_reshard import EQUAL, STALE, _errors, _gap, _step, _wrong

ACTOR = {"zero_stage": 1, "expert_parallel": 2}


@pytest.mark.slow
def test_experts_of_two_ranks_reach_both_engines_and_are_written_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    """Bit by bit after an update; all but the experts is shared. Controls: stale ones, and one that is damaged."""
    folder, written = write_family("Mixtral", tmp_path / "model"), tmp_path / "written"
    built = two_ranks.build(folder, ("actor", "rollout"), actor=ACTOR)
    assert built.parameters_copied == 4  # two of each layer
    assert built.parameters_shared > built.parameters_copied
    assert _gap(two_ranks) < EQUAL
    _step(two_ranks, tmp_path, 0)
    assert len(_wrong(two_ranks)) == 2 * built.parameters_copied
    assert _gap(two_ranks) > STALE
    replies = two_ranks.ask("reshard", version=1)
    actor = two_ranks.parameters()
    assert [reply.bytes for reply in replies] == 2 * [
        sum(4 * value.numel() for name, value in actor.items() if ".experts." in name)
    ]
    assert _wrong(two_ranks) == []
    assert _gap(two_ranks) < EQUAL
    two_ranks.ask("export", folder=str(written))
    loaded = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).state_dict()
    held = {name.removeprefix("lm."): value for name, value in actor.items() if name.startswith("lm.")}
    assert held.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in held.items())
    _step(two_ranks, tmp_path, 1)
    errors = _errors(two_ranks, 2, "penstock.engines.weights.gather.range_sums")
    assert not errors[0]
    assert "1 rollout parameters are not the actor's" in errors[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_experts_of_two_ranks_reach_another_group(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Stale after a step, equal after the reshard; the actor's second rank sends its experts to the first."""
    apart = Apart(two_ranks, one_rank, write_family("Qwen 3 MoE", tmp_path / "model"), tmp_path)
    apart.build(1, 1, expert_parallel=2)
    for version in range(2):
        apart.both("reshard", version=version)
        assert apart.gap() < EQUAL
        apart.step(version)
        assert apart.gap() > STALE
    errors = apart.both(
        "spoiled_refusal",
        arguments={"version": 2},
        look="penstock.engines.weights.gather.range_sums",
        rank=0,
        only="actor",
    )
    assert "not the actor's" in errors[0]["error"]
