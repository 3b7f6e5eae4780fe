"""Trainings over hosts that join by themselves end with the weights of as many ranks on one machine, bit for bit.

The hosts are processes of this machine: what differs from one machine is who starts a rank, how the ranks of a group
meet, and where models are read. Machines with networks of their own are in test_pool.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, Qwen2Config

from penstock.configs.loading.load import config_from_mapping
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.flows.train import train
from penstock.state.run_folder import RunFolder, read_metrics
from tests.hosts.conftest import TINY
from tests.hosts.machines import ROOT
from tests.session.machines.test_hosts import joining

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POLICY = {"roles": ["actor", "rollout"], "ranks": 2}
TRAIN, GENERATE = {"roles": ["actor"], "ranks": 2}, {"roles": ["rollout"], "ranks": 2}
JUDGES = {"roles": ["reference", "reward"], "ranks": 1}


@pytest.fixture(autouse=True)
def here(prefect_harness: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank computes with one thread, wherever it is: a share of the cores would be another order of sums."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A model with random weights that scores the characters of a response."""
    folder = tmp_path / "reward-model"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = make_byte_tokenizer(folder)
    settings = Qwen2Config(
        vocab_size=vocabulary, num_key_value_heads=2, num_labels=1, pad_token_id=0, initializer_range=0.5, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    return folder


def spread(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with each of its ranks on a host of its own."""
    return group | {"ranks": 1, "hosts": group["ranks"]}


def trained(folder: Path, tree: dict[str, Any]) -> RunFolder:
    """Train in this process."""
    train(config_from_mapping({**TINY, **tree}, "the test"), run_folder=str(folder))
    return RunFolder(folder)


def weights(run: RunFolder) -> bytes:
    """Return the trained model."""
    return (run.model("final") / "model.safetensors").read_bytes()


def learnt(run: RunFolder) -> bool:
    """Whether the iterations have moved what the warm-up left, and not a tensor or two alone."""
    before, after = (load_file(run.model(name) / "model.safetensors") for name in ("sft", "final"))
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    return len(moved) > len(after) // 3


def ranks_of(run: RunFolder) -> set[str]:
    """Return the ranks that have a log."""
    return {path.stem for path in run.logs.glob("*-rank*.log")}


def test_roles_on_other_machines_than_the_actor_s(
    tmp_path: Path, reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor on hosts 0 and 1, the rollout on 2 and 3, reference and reward model, which it reads, on the last.

    Controls: rewards and the KL are not constant, so that neither model is left out; no host is left without a rank.
    """
    groups: dict[str, Any] = {"train": TRAIN, "generate": GENERATE, "judges": JUDGES}
    tree = {
        "reward": {"model": str(reward_model), "function": None, "settings": None},
        "algorithm": {"kl": {"coefficient": 0.1}},
    }
    here = trained(tmp_path / "here", tree | {"groups": groups})
    ranks = [f"{name}-rank{rank}" for name, group in groups.items() for rank in range(group["ranks"])]
    with joining(tmp_path, monkeypatch, len(ranks)) as (port, keepers):
        apart = {name: spread(group) for name, group in groups.items()}
        there = trained(tmp_path / "there", tree | {"groups": apart, "hosts": {"port": port, "silence_s": 10}})
        assert [keeper.wait(10) for keeper in keepers] == [0] * len(ranks)
    assert weights(here) == weights(there)
    assert learnt(there)
    assert ranks_of(there) == ranks_of(here) == set(ranks)
    last = read_metrics(there)[-1]["metrics"]
    assert last["actor/kl"] != 0 and last["reward/std"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("actor", [{"zero_stage": 3}, {"lora": {"rank": 4, "alpha": 8}}], ids=["zero-3", "lora"])
def test_a_group_over_two_hosts(actor: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it has is in shards on both, or its adapters are the same on both. (At stage 1: test_pool.py.)"""
    tree = {"actor": actor, "reward": {"function": "tests.flows.reward_functions:low_digit"}}
    one = trained(tmp_path / "one", tree | {"groups": {"policy": POLICY}})
    with joining(tmp_path, monkeypatch, 2) as (port, _):
        hosts = {"port": port, "silence_s": 10}
        two = trained(tmp_path / "two", tree | {"groups": {"policy": spread(POLICY)}, "hosts": hosts})
    assert weights(one) == weights(two)
    assert learnt(two)
