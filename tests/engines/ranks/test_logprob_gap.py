"""vLLM and the actor are compared by what they compute, on every way that weights take; a gap ends the run in words.

The task itself, on real engines in float32: nothing in it is told what differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import LogprobGapError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.session.flow_runs.failures import FAILURE, told
from penstock.session.session import Session
from penstock.state.run_folder import RunFolder
from penstock.tasks.iteration.compare_logprobs import PROMPTS, TOKENS, compare_logprobs, comparison_due
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks, Shape
from tests.engines.weights.test_broadcast import Apart

FolderOf = Callable[[Shape], Path]
NUMBERS = itertools.count(100)  # a command's key is used once
PROMPT_TOKENS = [np.arange(3, 3 + length) for length in (1, 4, 7, 2, 11)]


def compare(actor: Ranks, rollout: Ranks, sections: dict[str, Any] | None = None) -> dict[str, float]:
    """Compare as a flow does."""
    session = Session(TrainConfig(**{**SMALL, **(sections or {})}), RunFolder(Path()))
    session.groups |= {"actor": actor.group, "rollout": rollout.group}
    session.prompts["train"] = PromptTable(pd.DataFrame({"prompt_tokens": PROMPT_TOKENS}), 0)
    training: Any = SimpleNamespace(config=session.config, session=lambda: session)
    return compare_logprobs.fn(training, next(NUMBERS), 16_384)


def _step(ranks: Ranks, folder: Path, version: int) -> None:
    path = write_rows(folder / f"{version}.parquet", random_rows(8, seed=version))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)


@pytest.mark.parametrize(
    ("shape", "count", "sections"),
    [
        (Shape("qwen2", tied=True), 1, {"actor": {"zero_stage": 2}}),
        (Shape("phi3", tied=False), 2, {"actor": {"zero_stage": 1}}),
        (Shape("qwen3", tied=False), 2, {"rollout": {**SMALL["rollout"], "tensor_parallel": 2}}),
        (Shape("llama", tied=False, intermediate=1024), 2, {"actor": {"zero_stage": 3}}),
        (Shape("qwen2", tied=True), 1, {"actor": {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}}}),
    ],
    ids=["shared", "two engines", "local", "gather", "adapters"],
)
def test_a_rollout_engine_that_computes_otherwise_ends_the_run(
    shape: Shape,
    count: int,
    sections: dict[str, Any],
    folder_of: FolderOf,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Control: it does not before, nor after an update and its reshard. The last rank's engine alone is disturbed."""
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    ranks.build(folder_of(shape), ("actor", "rollout"), **sections)
    figures = compare(ranks, ranks, sections)
    assert 0 < figures["rollout/logprob_gap"] <= figures["rollout/logprob_gap_max"] < 1e-4
    assert figures["time/compare_logprobs_s"] > 0
    _step(ranks, tmp_path, 0)
    ranks.ask("reshard", version=1)
    assert compare(ranks, ranks, sections)["rollout/logprob_gap"] < 1e-5
    ranks.ask("disturb", rank=count - 1, by=1e-2)
    with pytest.raises(
        LogprobGapError, match=r"differ by [\d.e-]+ on average and [\d.e-]+ at most; 0\.0001 is"
    ) as caught:
        compare(ranks, ranks, sections)
    message, code = told(caught.value, []) or ("", 0)
    assert code == FAILURE
    assert "raise rollout.max_logprob_gap" in message
    sections = {**sections, "rollout": {**sections.get("rollout", SMALL["rollout"]), "max_logprob_gap": 10.0}}
    assert 1e-4 < compare(ranks, ranks, sections)["rollout/logprob_gap"] < 10


def test_with_fp8_its_rounding_is_no_reason_to_stop(one_rank: Ranks, folder_of: FolderOf) -> None:
    """On one side alone, so that float32 shows it. Controls: the limit of float32, and weights of something else."""
    sections = {"rollout": {**SMALL["rollout"], "weights": "fp8"}}
    one_rank.build(folder_of(Shape("qwen2", tied=True)), ("actor", "rollout"), **sections)
    assert 0.02 < compare(one_rank, one_rank, sections)["rollout/logprob_gap"] < 0.5
    with pytest.raises(LogprobGapError, match=r"; 0\.0001 is"):
        compare(one_rank, one_rank)
    one_rank.ask("disturb", rank=0, by=1.0)
    with pytest.raises(LogprobGapError, match=r"; 0\.5 is"):
        compare(one_rank, one_rank, sections)


def test_two_groups_are_compared_likewise(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Tokens of the rollout group's engines, log-probs of the actor's group; stale weights are those of one update."""
    groups = {"train": {"roles": ["actor"]}, "generate": {"roles": ["rollout"]}}
    folder = folder_of(Shape("qwen3", tied=True))
    one_rank.build(folder, ("actor",), groups=groups)
    two_ranks.build(folder, ("rollout",), groups=groups)
    apart = Apart(one_rank, two_ranks, folder, tmp_path)
    apart.both("connect", store=one_rank.ask("listen")[0], number=0, rollout_ranks=2)
    apart.both("reshard", version=0)
    assert compare(one_rank, two_ranks)["rollout/logprob_gap"] < 1e-5
    _step(one_rank, tmp_path, 0)
    with pytest.raises(LogprobGapError):
        compare(one_rank, two_ranks)
    apart.both("reshard", version=1)
    assert compare(one_rank, two_ranks)["rollout/logprob_gap"] < 1e-5


def test_a_comparison_moves_nothing(one_rank: Ranks, folder_of: FolderOf) -> None:
    """Weights, generators and the next responses are those of a training that was never compared."""
    folder = folder_of(Shape("qwen2", tied=True))

    def state(compared: bool) -> tuple[Any, ...]:
        one_rank.build(folder, ("actor", "rollout"))
        sampling = {"samples": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6, "ignore_eos": False}
        prompts = Ragged(np.arange(4, 10, dtype=np.int32), np.asarray([0, 2, 6]))
        asked = {"prompts": prompts, "tokenizer": str(folder), "sampling": {**sampling, "seed": [0, 1, 0]}}
        one_rank.ask("generate", **asked)  # which seeds the generators
        if compared:
            compare(one_rank, one_rank)
        numbers = one_rank.ask("random_numbers")[0]["numbers"]
        again = one_rank.ask("generate", **asked)[0]
        weights = one_rank.parameters()
        return numbers, again.responses.values_T.tolist(), {name: value.tolist() for name, value in weights.items()}

    assert state(compared=True) == state(compared=False)


def test_every_engine_answers_prompts_of_its_own(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """Also where rollouts let engines pull what they have room for; and there are others the next time."""
    rollout = {**SMALL["rollout"], "reproducible": False}
    two_ranks.build(folder_of(Shape("qwen3", tied=True)), ("actor", "rollout"), rollout=rollout)
    prompts = Ragged(np.arange(3, 11, dtype=np.int32), np.arange(9))
    replies = two_ranks.ask("sample_to_compare", prompts=prompts, tokens=TOKENS, seed=[0, 0, 9])
    assert [len(reply.positions_P) for reply in replies] == [PROMPTS, PROMPTS]
    assert sorted(np.concatenate([reply.positions_P for reply in replies]).tolist()) == list(range(8))
    assert all(len(reply.logprobs_T) == PROMPTS * TOKENS for reply in replies)


def test_when_it_is_done() -> None:
    """After the first iteration, whose update shows first, and at the interval."""
    config = TrainConfig.model_validate({"rollout": {"compare_every": 3}})
    assert [number for number in range(1, 10) if comparison_due(config, number)] == [1, 3, 6, 9]
