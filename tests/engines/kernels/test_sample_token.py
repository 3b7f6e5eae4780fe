"""Tokens sampled with one random number per row: each is the one that the softmax's running sum has at that number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

Found = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a process with kernels, or with Triton's interpreter, drew."""
    out = tmp_path_factory.mktemp("sampled") / "sampled.npz"
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.engines.sampled_tokens", str(out)]
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = os.environ | interpreted
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with np.load(out) as arrays:
        return dict(arrays)


def _by_the_running_sum(logits_BV: np.ndarray, uniforms_B: np.ndarray) -> np.ndarray:
    weights_BV = np.exp(logits_BV - logits_BV.max(axis=1, keepdims=True))
    reached_BV = np.cumsum(weights_BV, axis=1)
    return (reached_BV <= (uniforms_B * reached_BV[:, -1])[:, None]).sum(axis=1)


def test_a_token_is_sampled_where_the_running_sum_passes_the_random_number(found: Found) -> None:
    """So its probability is its softmax; with other numbers (the control) most rows get other tokens."""
    sampled_B = (found["temperatures"] > 0) & ~found["nobody"]
    expected = _by_the_running_sum(found["logits"], found["uniforms"])
    np.testing.assert_array_equal(found["tokens"][sampled_B], expected[sampled_B])
    others = _by_the_running_sum(found["logits"], found["uniforms"][::-1])
    assert (others != expected)[sampled_B].mean() > 0.5
    assert found["tokens"][5] == 70


def test_without_temperature_the_likeliest_token_is_taken(found: Found) -> None:
    """Greedy and sampled requests may share a step; a row that belongs to no request is taken likewise."""
    greedy_B = (found["temperatures"] == 0) | found["nobody"]
    assert greedy_B.sum() > 10
    np.testing.assert_array_equal(found["tokens"][greedy_B], found["logits"].argmax(axis=1)[greedy_B])


def test_log_probs_are_those_of_the_tokens(found: Found) -> None:
    """Of greedy rows, too, and 0 where one token is left. Control: they are no other token's."""
    logits_BV, rows = found["logits"], np.arange(len(found["tokens"]))
    logprobs_BV = logits_BV - np.log(np.exp(logits_BV).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found["logprobs"], logprobs_BV[rows, found["tokens"]], atol=1e-6)
    assert found["logprobs"][5] == 0
    assert np.abs(found["logprobs"] - logprobs_BV[rows, (found["tokens"] + 1) % 60])[rows != 5].min() > 1e-4


def test_a_row_is_sampled_alike_whatever_else_is_in_the_step(found: Found) -> None:
    """By its request's seed and the token's position: at the next position it is sampled anew."""
    np.testing.assert_array_equal(found["alone"], found["tokens"][found["some"]])
    sampled_B = found["temperatures"] > 0
    assert (found["later"] != found["tokens"])[sampled_B].mean() > 0.5


def test_random_numbers_are_spread_over_the_whole_range(found: Found) -> None:
    """From 0 to below 1, and no two alike."""
    uniforms = found["uniforms"]
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert len(np.unique(uniforms)) == len(uniforms)
    assert np.histogram(uniforms, bins=4, range=(0, 1))[0].min() > 5


def test_vllm_has_the_functions_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler calls them by these names with these arguments; one that takes others keeps its own."""
    from vllm.v1.worker.gpu.sample import sampler

    from penstock.engines.rollout import vllm as versions

    own = (sampler.gumbel_sample, sampler.compute_topk_scores)
    monkeypatch.setattr(sampler, "gumbel_sample", own[0])
    monkeypatch.setattr(sampler, "compute_topk_scores", own[1])
    assert versions.sample_tokens_in_one_pass()
    assert sampler.gumbel_sample is not own[0]
    assert sampler.compute_topk_scores is not own[1]

    def other(logits: object, seeds: object) -> None: ...

    for name in ("gumbel_sample", "compute_topk_scores"):
        monkeypatch.setattr(sampler, "gumbel_sample", own[0])
        monkeypatch.setattr(sampler, "compute_topk_scores", own[1])
        monkeypatch.setattr(sampler, name, other)
        assert not versions.sample_tokens_in_one_pass()
        assert {own[0], own[1], other} > {sampler.gumbel_sample, sampler.compute_topk_scores}


def test_vllms_sampler_gets_the_log_probs_that_come_with_the_tokens(found: Found) -> None:
    """Controls: for other tokens or logits, or where the likeliest are asked for, vLLM computes them."""
    assert found["scores"].tolist() == found["logprobs"].tolist()
    assert found["scored_tokens"].tolist() == found["tokens"].tolist()
    assert found["left_to_vllm"].tolist() == [False, True, True, True]
