"""Whole trainings of a mixture whose tokens take the rollout's experts: as with its own where these are the same.

In float32, with one step on each batch, vLLM and the actor choose alike, so that nothing may differ to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.benchmarks.workload.families import write_family
from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.experience import ROUTES, column_names, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
SHORT = (
    "iterations=3",
    "model.tiny=null",
    "sft=null",
    "data.arithmetic={digits: 2, train: 40, heldout: 8}",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32, compare_every: 1}",
    "evaluate.every=0",
    "checkpoint={every: 1, keep: 3}",
    "algorithm={name: grpo, mini_batches: 1, router_loss_coefficient: 0.01}",
    "algorithm.kl={place: reward, estimator: k1, coefficient: 0.05}",
    "algorithm.dynamic_sampling={max_rollouts: 2}",
)
FIGURES = {"actor/routing_mismatch", "rollout/logprob_gap_own_routing"}


def trained(folder: Path, model: Path, routing: str) -> RunFolder:
    """A finished training of the tiny mixture."""
    overrides = (*SHORT, f"model.path={model}", f"actor.routing={routing}", f"record.experiment={routing}")
    train(load_config(ROOT / "configs" / "quickstart.yaml", overrides), run_folder=str(folder))
    return RunFolder(folder)


def test_it_ends_in_the_same_bits_and_its_tasks_can_be_run_again(
    prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and reference log-probs, groups of a second rollout; again from a checkpoint and what the folder holds."""
    monkeypatch.chdir(ROOT)
    model = write_family("Qwen 3 MoE", tmp_path / "model")
    own, replayed = (trained(tmp_path / routing, model, routing) for routing in ("own", "replay"))
    figures = [record["metrics"] for record in read_metrics(replayed) if record["iteration"]]
    assert [one["actor/routing_mismatch"] for one in figures] == [0.0] * 3
    assert all(one["rollout/logprob_gap_own_routing"] == one["rollout/logprob_gap"] < 1e-5 for one in figures)
    assert any(one["rollout/prompts_drawn"] > 8 for one in figures)
    kept = [(n, {k: v for k, v in record.items() if k not in FIGURES}) for n, record in numbers(replayed)]
    assert kept == numbers(own)
    assert weights(replayed) == weights(own)
    path = replayed.experience(3)
    columns = read_columns(path, ["prompt_tokens", "response_tokens", ROUTES])
    tokens_B = columns["prompt_tokens"].lengths_B + columns["response_tokens"].lengths_B
    assert (columns[ROUTES].lengths_B == tokens_B * 2 * 2).all()
    assert ROUTES not in column_names(own.experience(3))
    done = replay(str(replayed.path), 3)
    assert [row for row in done.rows if not row.equal] == []
    assert {"old_logprobs", "update_actor"} <= {row.task for row in done.rows}
