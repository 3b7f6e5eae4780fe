"""Actor and rollout in two groups: what is broadcast is what the actor computes with, and both sides know if it is not.

Two engine groups with processes, worlds and (on GPUs) devices of their own, as in a training; the flow's part, telling
one group the other's port, is the test's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.rollout import PartialResults
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks, Shape

FolderOf = Callable[[Shape], Path]
EQUAL, STALE = 1e-5, 0.05
PROMPTS = Ragged.of([np.arange(3, 3 + length) for length in (1, 4, 7, 2)], np.int32)


@dataclass(frozen=True)
class Apart:
    """An actor group and a rollout group."""

    actor: Ranks
    rollout: Ranks
    model: Path
    folder: Path  # for experience

    def both(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to both groups at the same time; the actor's replies first."""
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(ranks.ask, command, **arguments) for ranks in (self.actor, self.rollout)]
            return [reply for call in calls for reply in call.result()]

    def build(self, stage: int, tensor_parallel: int, rollout: dict[str, Any] = SMALL["rollout"], **actor: Any) -> None:
        """Build both groups, connect them and bring the first weights."""
        sections: dict[str, Any] = {
            "groups": {"train": {"roles": ["actor"]}, "generate": {"roles": ["rollout"]}},
            "actor": {"zero_stage": stage, **actor},
            "rollout": {**rollout, "tensor_parallel": tensor_parallel},
        }
        self.actor.build(self.model, ("actor",), **sections)
        self.rollout.build(self.model, ("rollout",), **sections)
        store = self.actor.ask("listen")[0]
        self.both("connect", store=store, number=0, rollout_ranks=self.rollout.count)

    def step(self, version: int, learning_rate: float = 1e-2) -> None:
        """Train on random experience, hard enough to change every weight."""
        path = write_rows(self.folder / f"{version}.parquet", random_rows(8, seed=version))
        split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
        self.actor.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=learning_rate)

    def gap(self) -> float:
        """Mean difference between vLLM's and the trainer's log-probs of what vLLM sampled."""
        asked = {"prompts": PROMPTS.values_T, "offsets": PROMPTS.offsets_B1}
        replies = self.rollout.ask("rollout_logprobs", tokens=12, **asked)
        assert all(np.array_equal(reply["tokens"], replies[0]["tokens"]) for reply in replies)
        responses = Ragged(replies[0]["tokens"], replies[0]["offsets"])
        mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
        rows = Rows(PROMPTS, responses, mask, {})
        path = write_rows(self.folder / "sampled.parquet", rows)
        ours_T = gathered(rows, self.actor.ask("logprobs", path=path, role="actor", temperature=1.0, budget=10_000))
        return max(float(np.abs(reply["vllm"] - ours_T).mean()) for reply in replies)


@pytest.mark.parametrize(
    ("shape", "stage", "trainers", "tensor_parallel"),
    [
        (Shape("qwen2", tied=False), 2, 1, 1),
        (Shape("qwen3", tied=True, vocabulary=100), 2, 1, 2),
        (Shape("llama", tied=False, intermediate=1024), 3, 2, 1),
    ],
    ids=["zero-2 to two engines", "zero-2 to one engine of two ranks", "zero-3 on two ranks to one engine"],
)
def test_weights_reach_the_other_group(
    shape: Shape,
    stage: int,
    trainers: int,
    tensor_parallel: int,
    one_rank: Ranks,
    two_ranks: Ranks,
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Stale after a step, equal after the reshard, for both groups the same version; damage fails both."""
    actor, rollout = (one_rank, two_ranks) if trainers == 1 else (two_ranks, one_rank)
    apart = Apart(actor, rollout, folder_of(shape), tmp_path)
    apart.build(stage, tensor_parallel)
    error = apart.rollout.ask("refusal", of="generate", arguments=_request(apart))[0]["error"]
    assert "a reshard comes first" in error
    replies = apart.both("reshard", version=0)
    size = sum(parameter.numel() for parameter in apart.actor.parameters().values()) * 4
    moved = [size, *[0] * (trainers - 1), *[size] * apart.rollout.count]
    assert [reply.bytes for reply in replies] == moved
    assert {reply.strategy for reply in replies} == {"broadcast"}
    assert replies[-1].parameters_shared == 0
    assert apart.gap() < EQUAL
    apart.step(0)
    assert apart.gap() > STALE
    apart.both("reshard", version=1)
    assert apart.gap() < EQUAL
    assert {reply.policy_version for reply in apart.rollout.ask("generate", **_request(apart)) if reply} == {1}
    store = apart.actor.ask("listen")[0]
    apart.both("connect", store=store, number=1, rollout_ranks=apart.rollout.count)  # as when a group has come or gone
    apart.step(1)  # refused if the actor's side did not know that version 1 is verified
    errors = [
        reply["error"]
        for reply in apart.both(
            "spoiled_refusal",
            arguments={"version": 2},
            look="penstock.engines.weights.broadcast.word_sum",
            rank=apart.rollout.count - 1,
            only="rollout",
        )
    ]
    assert "1 checksums differ on other ranks" in errors[0]
    assert errors[1:trainers] == [""] * (trainers - 1)
    assert all("not the actor's" in error or "on other ranks" in error for error in errors[trainers:])
    assert "1 rollout parameters are not the actor's" in errors[-1]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_weights_reach_a_generation_that_is_under_way(
    tensor_parallel: int, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Responses that one version began are ended by the next, and vLLM's log-probs of their last tokens are that one's.

    An engine holds a few responses of many, so that the generation takes many times as long as the new weights.
    Controls: their first tokens' are not, and neither are the last ones' of responses that had ended before.
    """
    samples = 64
    apart = Apart(one_rank, two_ranks, folder_of(Shape("qwen3", tied=False)), tmp_path)
    rollout = {"prompts": 4, "samples": samples, "max_response_tokens": 400, "max_sequences": 8}
    apart.build(2, tensor_parallel, rollout=rollout)
    apart.both("reshard", version=0)
    apart.step(0)
    asked, ended, under_way = _request(apart), [], Event()
    asked["sampling"] |= {"samples": samples, "temperature": 1.0, "max_tokens": 400, "logprobs": True}

    def hear(news: PartialResults) -> None:
        ended.extend(news.ended.positions)
        if len(ended) > 16:
            under_way.set()

    with ThreadPoolExecutor(1) as pool:
        each = [asked] * apart.rollout.count
        generating = pool.submit(apart.rollout.ask_each, "generate", each, hear)
        assert under_way.wait(60)
        apart.both("reshard", version=1)
        replies = [reply for reply in generating.result() if reply is not None]
    first, last, versions = [], [], []  # gaps of every response's first and last token, and who sampled these
    for reply in replies:
        responses = reply.responses
        mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
        rows = Rows(PROMPTS.take(np.repeat(reply.positions_P, samples)), responses, mask, {})
        path = write_rows(tmp_path / "drawn.parquet", rows)
        ours_T = gathered(rows, apart.actor.ask("logprobs", path=path, role="actor", temperature=1.0, budget=10_000))
        gaps_T, ends_B1 = np.abs(reply.logprobs_T - ours_T), responses.offsets_B1
        first.append(gaps_T[ends_B1[:-1]])
        last.append(gaps_T[ends_B1[1:] - 1])
        versions.append(np.stack([reply.first_version_B, reply.last_version_B]))
    first_B, last_B = np.concatenate(first), np.concatenate(last)
    began_B, ended_B = np.concatenate(versions, axis=1)
    met_B = (began_B == 0) & (ended_B == 1)
    assert met_B.any()
    assert last_B[ended_B == 1].max() < 1e-4
    assert first_B[met_B].mean() > STALE
    assert last_B[ended_B == 0].mean() > STALE


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_adapters_reach_the_other_group_merged(
    tensor_parallel: int, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """The rollout group knows nothing of them: it gets whole weights, the base's where there is no adapter."""
    apart = Apart(one_rank, two_ranks, folder_of(Shape("qwen2", tied=True)), tmp_path)
    apart.build(2, tensor_parallel, lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj", "down_proj"]})
    for version in range(2):
        moved = [reply.bytes for reply in apart.both("reshard", version=version)]
        held = apart.actor.parameters().items()
        size = sum(parameter.numel() for name, parameter in held if "lora_" not in name) * 4
        assert moved == [size] * 3
        assert apart.gap() < EQUAL
        apart.step(version, learning_rate=5e-2)
        assert apart.gap() > STALE


def test_groups_of_different_models_are_refused(one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf) -> None:
    """Their collectives would have other sizes, and hang. Control: the tests above connect."""
    apart = Apart(one_rank, two_ranks, Path(), Path())
    groups = {"train": {"roles": ["actor"]}, "generate": {"roles": ["rollout"]}}
    one_rank.build(folder_of(Shape("qwen2", tied=False)), ("actor",), groups=groups)
    two_ranks.build(folder_of(Shape("qwen2", tied=True)), ("rollout",), groups=groups)
    arguments = {"store": one_rank.ask("listen")[0], "number": 0, "rollout_ranks": 2}
    errors = [reply["error"] for reply in apart.both("refusal", of="connect", arguments=arguments)]
    assert all("different parameters, shapes or dtypes" in error for error in errors)


def _request(apart: Apart) -> dict[str, Any]:
    sampling = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4, "ignore_eos": False}
    return {
        "prompts": PROMPTS,
        "tokenizer": str(apart.model),
        "sampling": {**sampling, "seed": [0, 0, 0]},
    }
