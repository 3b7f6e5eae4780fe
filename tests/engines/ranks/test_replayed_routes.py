"""Experts that vLLM's tokens took, replayed by the actor: real engines sample, and the same ranks learn from it.

Suffix: `_TLK` tokens of a row times layers times experts of each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import SIZES, write_family
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.batches.packing import Rows
from penstock.state.experience import ROUTES, add_columns
from tests.engines.ranks.test_logprob_gap import compare
from tests.engines.rows import LOSS, SPLIT, gathered, with_columns, write_rows
from tests.engines.shared_ranks import Ranks

REPLAY: dict[str, Any] = {"actor": {"routing": "replay"}}
SAMPLING: dict[str, Any] = {
    **{"samples": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12, "ignore_eos": False},
    **{"logprobs": True, "routes": True, "seed": [0, 1, 0]},
}


@dataclass(frozen=True)
class Sampled:
    """A small rollout: its rows, vLLM's log-probs of their tokens and the experts that these took."""

    rows: Rows
    logprobs_T: np.ndarray
    routes: Ragged

    def write(self, path: Path, routes: Ragged | None = None) -> str:
        """As experience, with other routes if they are given."""
        written = write_rows(path, self.rows)
        add_columns(path, {ROUTES: self.routes if routes is None else routes})
        return written


def sample(ranks: Ranks, folder: Path, count: int = 8) -> Sampled:
    """Let vLLM answer random prompts."""
    random = np.random.default_rng(4)
    prompts = Ragged.of([random.integers(3, 64, length) for length in random.integers(2, 14, count)], np.int32)
    reply = ranks.ask("generate", prompts=prompts, tokenizer=str(folder), sampling=SAMPLING)[0]
    tokens = len(reply.responses.values_T)
    mask = Ragged(np.ones(tokens, np.uint8), reply.responses.offsets_B1)
    rows = Rows(prompts.take(np.repeat(reply.positions_P, 2)), reply.responses, mask, {})
    columns = {"advantages": random.normal(size=tokens), "logprobs_old": reply.logprobs_T}
    return Sampled(with_columns(rows, columns), reply.logprobs_T, reply.routes)


def learn(ranks: Ranks, path: str, **loss: float) -> dict[str, float]:
    """One optimizer step in several micro-batches."""
    told = {"split": {**SPLIT, "micro_batch_tokens": 64}, "loss": {**LOSS, **loss}, "learning_rate": 1e-2}
    figures: dict[str, float] = ranks.ask("update_actor", path=path, version=0, **told)[0]
    assert figures["micro_batches"] > 2
    return figures


def another_expert(routes: Ragged) -> Ragged:
    """The routes with every expert's number one higher, of four."""
    return replace(routes, values_T=np.where(routes.values_T == 255, 255, (routes.values_T + 1) % 4).astype(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, id="all weights"),
        pytest.param(
            {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}, id="adapters", marks=pytest.mark.exhaustive
        ),
        pytest.param({"rank": 8, "alpha": 8, "experts": True}, id="adapters on experts", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_with_routes_that_are_the_actors_own_ends_in_the_same_bits(
    one_rank: Ranks, lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    """With the loss that has experts used evenly. Control: with others the log-probs and the weights are others."""
    folder = write_family("Qwen 3 MoE", tmp_path / "model")

    def build(routing: str) -> None:
        one_rank.build(folder, ("actor", "rollout"), actor={"routing": routing, "lora": lora, "zero_stage": 0})

    def logprobs(path: str) -> np.ndarray:
        asked = {"path": path, "role": "actor", "temperature": 1.0, "budget": 64, "replayed": True}
        return gathered(sampled.rows, one_rank.ask("logprobs", **asked))

    build("replay")
    sampled = sample(one_rank, folder)
    path, other = sampled.write(tmp_path / "1.parquet"), tmp_path / "2.parquet"
    wrong = sampled.write(other, another_expert(sampled.routes))
    assert np.abs(logprobs(path) - sampled.logprobs_T).max() < 1e-4
    assert np.abs(logprobs(wrong) - sampled.logprobs_T).mean() > 0.05
    replayed = learn(one_rank, path, router_loss_coefficient=0.1)
    weights = one_rank.parameters()
    assert replayed.pop("routing_mismatch") == 0

    build("own")
    assert learn(one_rank, path, router_loss_coefficient=0.1) == replayed
    assert all(torch.equal(value, weights[name]) for name, value in one_rank.parameters().items())

    build("replay")
    assert learn(one_rank, wrong, router_loss_coefficient=0.1)["routing_mismatch"] > 0.2
    assert not all(torch.equal(value, weights[name]) for name, value in one_rank.parameters().items())


def write_mixture(folder: Path) -> Path:
    """A mixture with 32 experts, of which many are alike to a token: in bfloat16 vLLM and the actor choose others."""
    sizes = {**SIZES, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_hidden_layers": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**sizes))
    model.save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder


@pytest.mark.slow
def test_in_bfloat16_replay_brings_the_actors_logprobs_nearer(one_rank: Ranks, tmp_path: Path) -> None:
    """There vLLM and the actor choose other experts for some tokens. Control: the experts of other tokens.

    The comparison of a training measures both.
    """
    folder = write_mixture(tmp_path / "model")
    sections: dict[str, Any] = {**REPLAY, "model": {"path": str(folder), "dtype": "bfloat16"}}
    one_rank.build(folder, ("actor", "rollout"), **sections)
    sampled, count = sample(one_rank, folder, 32), itertools.count()

    def gap(values_T: np.ndarray) -> float:
        path = sampled.write(tmp_path / f"{next(count)}.parquet", replace(sampled.routes, values_T=values_T))
        asked = {"path": path, "role": "actor", "temperature": 1.0, "budget": 256, "replayed": True}
        return float(np.abs(gathered(sampled.rows, one_rank.ask("logprobs", **asked)) - sampled.logprobs_T).mean())

    routes_T = sampled.routes.values_T
    replayed, own = gap(routes_T), gap(np.full_like(routes_T, 255))
    assert replayed < 0.85 * own
    assert gap(np.roll(routes_T, 16)) > 5 * own  # of the token before
    compared = [compare(one_rank, one_rank, sections) for _ in range(6)]
    gaps, owns = ([figures[f"rollout/logprob_gap{of}"] for figures in compared] for of in ("", "_own_routing"))
    assert sum(gaps) < sum(owns)
    figures = learn(one_rank, sampled.write(tmp_path / "experience.parquet"))
    assert 0.001 < figures["routing_mismatch"] < 0.05
