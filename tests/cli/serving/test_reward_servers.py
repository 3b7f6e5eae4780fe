"""A reward model and a judge behind vLLM's real server, as `penstock serve` starts it, asked by the real clients.

The references are independent: the classifier as a training holds it, and the library's own greedy generation. Whole
trainings learn from either.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.cli.prefect.server import end_with_this_process
from penstock.cli.serving.serve import _CPU, QUIET
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.reward_servers import JudgeConfig, ServiceConfig
from penstock.data.prompts import PromptTable
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.groups import interface
from penstock.engines.models.loading import load_reward_model
from penstock.engines.models.models import PackedRewardModel
from penstock.flows.train import train
from penstock.rewards.judge import Judge, check_judge
from penstock.rewards.service import RewardService, check_service
from penstock.rewards.types import Sample
from penstock.state.run_folder import RunFolder, read_metrics
from tests.engines.shared_ranks import Shape
from tests.sockets import doors, open_to_others
from tests.waiting import came_true

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

SMALL: dict[str, Any] = {
    "iterations": 2,
    "data": {"arithmetic": {"digits": 2, "train": 40, "heldout": 8}, "max_prompt_tokens": 8},
    "rollout": {"prompts": 8, "samples": 4, "max_response_tokens": 6, "max_sequences": 32},
    "algorithm": {"name": "grpo", "mini_batches": 1},
    "actor": {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 0}},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} =>{% endfor %}"
START_S = 200.0
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Servers:
    """Where both models lie and are served."""

    classifier: Path
    classifier_url: str
    judge: Path
    judge_url: str
    process: psutil.Process  # above all of theirs


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A random classifier and a random language model that can chat, each behind a server of its own."""
    folder = tmp_path_factory.mktemp("served")
    classifier, judge = folder / "scores", folder / "judge"
    Shape("qwen3", tied=True, classes=1).write(classifier)
    Shape("qwen3", tied=True).write(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(judge)
    ports = free_ports(2)
    log = (folder / "log").open("wb")
    command = [sys.executable, str(Path(__file__).with_name("vllm_servers.py"))]
    command += [str(classifier), str(ports[0]), str(judge), str(ports[1])]
    process = subprocess.Popen(
        command,
        env={**os.environ, **QUIET, **_CPU, **interface.variables(), "PYTHONPATH": str(ROOT)},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    guard = end_with_this_process(process.pid)
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        known = came_true(lambda: process.poll() is not None or all(map(answers, urls)), START_S)
        assert known and process.poll() is None, (folder / "log").read_text()[-4000:]
        yield Servers(classifier, urls[0], judge, urls[1], psutil.Process(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        guard.kill()
        guard.wait()
        log.close()


def test_other_machines_reach_neither_server_nor_engine(servers: Servers) -> None:
    """Each server's own port is seen; the engines' gloo and whatever they meet in stay on the loopback interface.

    A version of vLLM whose engine would open a store is given a file.
    """
    found = list(doors(servers.process))
    assert {int(url.rpartition(":")[2]) for url in (servers.classifier_url, servers.judge_url)} <= {
        door.port for door in found
    }
    assert open_to_others(found) == []
    asked = "import penstock.cli.serving.vllm_server; from vllm.v1.executor import uniproc_executor as executor; "
    asked += "print(executor.get_distributed_init_method('203.0.113.1', 29500))"
    said = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1].startswith("file://")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [int(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return ports


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def samples_of(first: int, count: int) -> list[Sample]:
    """Sums with prompts and responses of different lengths."""
    return [
        Sample(str(k), f"train-{k}", f"{k * 37 % 1000}+{k}=", f"{k * 38}. " + "abc"[: k % 4], {"answer": k})
        for k in range(first, first + count)
    ]


def reward_of(servers: Servers, **settings: int) -> RewardConfig:
    """The reward section of a training that asks the service."""
    return RewardConfig(service=ServiceConfig(url=servers.classifier_url, model="scores", **settings))


def scores_inside(folder: Path, samples: list[Sample]) -> np.ndarray:
    """The same samples' scores by `reward.model` of a training."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [sample.prompt + sample.response for sample in samples]
    tokens = Ragged.of([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], np.int32)
    nothing = Ragged(np.empty(0, np.int32), np.zeros(len(texts) + 1, np.int64))
    rows = Rows(tokens, nothing, nothing, {})
    model = PackedRewardModel(load_reward_model(folder, torch.float32)).eval()
    with torch.no_grad():
        return model(pack(rows, list(range(len(texts))), torch.device("cpu"))).numpy()


def test_a_service_gives_the_scores_of_the_model_inside_a_training(servers: Servers) -> None:
    """To rounding of float32, in batches as well as alone; scores of other samples are far away."""
    samples = samples_of(1, 24)
    expected = scores_inside(servers.classifier, samples)
    check_service(reward_of(servers))
    for batch in (1, 7, 64):
        found = RewardService(reward_of(servers, batch=batch)).score(samples)
        assert [score.failure for score in found] == [None] * 24
        np.testing.assert_allclose([score.reward for score in found], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(np.diff(np.sort(expected))).min() > 0 and expected.std() > 0.1


def test_trainings_share_a_service(servers: Servers) -> None:
    """Two ask at the same time: each gets the scores of its own samples, in its own order."""
    together = threading.Barrier(2)
    shares = [samples_of(1, 40), samples_of(101, 30)[::-1]]

    def training(samples: list[Sample]) -> list[float]:
        scorer = RewardService(reward_of(servers, batch=3, concurrency=4))
        together.wait()
        return [score.reward for score in scorer.score(samples)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(training, shares))
    for samples, rewards in zip(shares, found, strict=True):
        np.testing.assert_allclose(rewards, scores_inside(servers.classifier, samples), rtol=1e-4, atol=1e-5)


def test_a_text_longer_than_the_model_fails_alone(servers: Servers) -> None:
    """The server refuses the request that holds it; the other samples of that request keep their scores."""
    samples = samples_of(1, 6)
    samples[2] = Sample("long", "p", "1" * 600, "2", {})
    found = RewardService(reward_of(servers, batch=6)).score(samples)
    assert [score.failure is None for score in found] == [True, True, False, True, True, True]
    assert "HTTP 400" in str(found[2].failure)


def test_the_wrong_server_is_refused(servers: Servers) -> None:
    """A language model does not score texts, and each server knows its own model only."""
    with pytest.raises(UserError, match="does not offer 'judge'; it offers 'scores'"):
        check_service(RewardConfig(service=ServiceConfig(url=servers.classifier_url, model="judge")))
    with pytest.raises(UserError, match="does not score a text with 'judge'"):
        check_service(RewardConfig(service=ServiceConfig(url=servers.judge_url, model="judge")))


@pytest.mark.parametrize("chat", [True, False])
def test_a_judges_rewards_are_the_numbers_in_its_greedy_text(servers: Servers, chat: bool) -> None:
    """As chat and as a text to be continued; the texts equal those of the library's own generation."""
    judge = JudgeConfig(
        url=servers.judge_url,
        model="judge",
        template="{prompt} {response} or {answer} ",
        chat=chat,
        pattern=r"(\d)",
        scale=0.1,
        max_tokens=12,
    )
    config = RewardConfig(judge=judge, failure_value=-1.0, max_failure_share=1.0)
    check_judge(config, ["answer"])
    samples = samples_of(1, 8)
    with Judge(config, ["answer"]) as scorer:
        found = scorer.score(samples)
    texts = [f"{sample.prompt} {sample.response} or {sample.columns['answer']} " for sample in samples]
    expected = greedy(servers.judge, [f"user: {text} =>" if chat else text for text in texts])
    assert [score.answer for score in found] == expected
    digits = [any(letter.isdigit() for letter in text) for text in expected]
    assert [score.failure is None for score in found] == digits
    rewards = [
        0.1 * int(re.findall(r"\d", text)[-1]) if has else -1.0 for text, has in zip(expected, digits, strict=True)
    ]
    assert [score.reward for score in found] == pytest.approx(rewards)
    assert len(set(rewards)) > 2


def trained(servers: Servers, folder: Path, reward: dict[str, Any]) -> RunFolder:
    """Train the language model that is served by a reward."""
    config = {**SMALL, "model": {"path": str(servers.judge)}, "reward": reward}
    train(TrainConfig.model_validate(config), run_folder=str(folder))
    return RunFolder(folder)


def moved(run: RunFolder, others: Path) -> float:
    """Return the mean distance of a run's weights from those in another folder."""
    weights, theirs = (load_file(folder / "model.safetensors") for folder in (run.model("final"), others))
    apart = [(weights[name].double() - theirs[name].double()).abs() for name in weights]
    return float(sum(part.sum() for part in apart) / sum(part.numel() for part in apart))


@pytest.mark.usefixtures("prefect_harness")
def test_a_training_learns_from_a_service_as_from_the_model_inside(servers: Servers, tmp_path: Path) -> None:
    """The same responses, rewards to rounding, and weights that are as near. Control: the weights have moved."""
    inside = trained(servers, tmp_path / "inside", {"model": str(servers.classifier)})
    service = {"url": servers.classifier_url, "model": "scores"}
    outside = trained(servers, tmp_path / "outside", {"service": service})
    one, other = (pd.read_parquet(run.experience(1)) for run in (inside, outside))
    assert one["response"].tolist() == other["response"].tolist() and one["reward"].std() > 0.1
    np.testing.assert_allclose(one["reward"], other["reward"], rtol=1e-4, atol=1e-4)
    assert moved(outside, inside.model("final")) < 0.02 * moved(outside, servers.judge)


@pytest.mark.usefixtures("prefect_harness")
def test_a_training_learns_from_a_judge(servers: Servers, tmp_path: Path) -> None:
    """Its rewards are what the judge says when it is asked once more; a text without a number fails, and is counted."""
    judge = {
        "url": servers.judge_url,
        "model": "judge",
        "template": "{prompt} {response} or {answer} ",
        "chat": False,
        "pattern": r"(\d)",
        "scale": 0.1,
        "max_tokens": 12,
    }
    reward = {"judge": judge, "failure_value": 0.0, "max_failure_share": 1.0}
    run = trained(servers, tmp_path / "judged", reward)
    found = pd.read_parquet(run.experience(2))
    answers = PromptTable.load(run.prompts("train")).frame.set_index("prompt_id")["answer"]
    columns = zip(found["prompt"], found["response"], answers[found["prompt_id"]], strict=True)
    samples = [Sample(str(k), str(k), said, text, {"answer": answer}) for k, (said, text, answer) in enumerate(columns)]
    with Judge(RewardConfig.model_validate(reward), ["answer"]) as scorer:
        again = scorer.score(samples)
    assert found["reward_answer"].tolist() == [score.answer for score in again]
    assert found["reward"].tolist() == pytest.approx([score.reward for score in again])
    failed = found["reward_failure"].notna()
    assert failed.tolist() == [score.failure is not None for score in again] and 0 < failed.sum() < len(found)
    counted = read_metrics(run)[-1]["metrics"]
    assert counted["reward/failures"] == failed.sum() and found["reward"].std() > 0
    assert moved(run, servers.judge) > 1e-4


def greedy(folder: Path, prompts: list[str]) -> list[str]:
    """Continue each prompt by twelve tokens, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts
