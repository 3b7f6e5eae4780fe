"""Trees of verifiers: what is learnt from an episode whose agent branches is what verifiers itself says was sampled.

Its own client for trainings asks, by tokens that its renderer makes, and its traces have the tokens of each branch.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.configs.sections.model import TinyModel
from penstock.data.prompts import PromptTable
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.commands.message import decode_reply
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.environments.verifiers import FILE
from tests.chat.model import TEMPLATE, make_chat_model
from tests.engines.shared_ranks import Ranks
from tests.engines.unpacked import load_unpacked
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("verifiers"), pytest.mark.timeout(600)]

TASKSET = Path(__file__).with_name("verifiers_trees.py")
KINDS = ["compacts", "delegates", "delegates_at_once", "retakes"]
SAMPLES, PROMPT, LIMIT, STEPS = 4, 64, 900, 80
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Played:
    """Episodes as the engine tells of them, and the traces that verifiers returned."""

    reply: EngineResponses
    traces: list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of the engine and of its episodes, with the taskset."""
    folder = tmp_path_factory.mktemp("trees")
    shutil.copy(TASKSET, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def rank(folder: Path) -> Iterator[Ranks]:
    ranks = Ranks.start(1, folder / "log")
    yield ranks
    ranks.group.close(grace_s=1.0)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learnt to answer in a few words, and not what."""
    folder = tmp_path_factory.mktemp("talker")
    generator = np.random.default_rng(0)
    said = [(f"What is {a}+{b}?", f"It is {c}.") for a, b, c in generator.integers(0, 9, (256, 3)).tolist()]
    tiny = TinyModel(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=128, max_positions=PROMPT + LIMIT)
    make_chat_model(folder, [TEMPLATE, *(text for pair in said for text in pair)], tiny)
    tokenizer, model = load_tokenizer(str(folder)), load_unpacked(folder)
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": told}] for asked, told in said]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so little several wait for each other
    for step in range(STEPS):
        inputs = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in rows[step % 8 :: 8]], batch_first=True, padding_value=tokenizer.pad_token_id
        )
        labels = inputs.masked_fill(inputs == tokenizer.pad_token_id, -100)
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    return folder


def played(rank: Ranks, python: str, model: Path, folder: Path, max_paths: int) -> Played:
    """Play a task of each kind, several times."""
    kept = folder / f"traces-{max_paths}"
    kept.mkdir()
    taskset = {"id": TASKSET.stem, "largest": 1, "kinds": KINDS}
    env = {"traces": str(kept), "model": str(model)}
    entry = {"python": python, "taskset": taskset, "env": env}
    (folder / FILE).write_text(json.dumps({"tasksets": {"trees": entry}}))
    tasks = [4 * kind for kind in range(len(KINDS))]
    of_data = Ragged.of([np.arange(4, 6)] * len(tasks), np.int32)
    names = [f"train-{number:06d}" for number in range(len(tasks))]
    rows = {"prompt_id": names, "prompt_text": "-", "prompt_tokens": [of_data.row(0)] * len(tasks), "task": tasks}
    table = folder / "data" / "train.parquet"
    table.parent.mkdir(exist_ok=True)
    PromptTable(pd.DataFrame(rows), 0).save(table)
    section = {"type": "penstock.environments.verifiers:Taskset", "settings": {"name": "trees"}, "timeout_s": 120}
    rank.build(
        model,
        ("actor", "rollout"),
        environment={**section, "workers": 1, "max_turns": 12, "max_paths": max_paths},
        rollout={"prompts": len(tasks), "samples": SAMPLES, "max_response_tokens": LIMIT, "max_sequences": 32},
        algorithm={"correction": {}},
        data={"max_prompt_tokens": PROMPT},
    )
    sampling = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": LIMIT}
    request = {
        "prompts": of_data,
        "sampling": {**sampling, "ignore_eos": False, "seed": [7, 0, 0], "logprobs": True},
        "tokenizer": str(model),
        "episodes": {"table": str(table), "prompt_ids": names},
    }
    reply = decode_reply(Generate, rank.ask("watched_generate", arguments=request)[0]["reply"])
    assert reply is not None and reply.episodes is not None and not any(reply.episodes.failures_B)
    traces = [json.loads(path.read_text()) for path in kept.iterdir()]
    assert len(traces) == len(reply.responses) == len(tasks) * SAMPLES
    return Played(reply, traces)


def paths_of(reply: EngineResponses, row: int) -> list[tuple[list[int], list[int], list[int]]]:
    """A sample's paths: of each the prompt, what is behind it, and which of that is learnt from."""
    played = reply.episodes
    assert played is not None and played.asked is not None
    tokens = reply.responses.row(row).tolist()
    mask = Ragged(played.loss_mask_T, reply.responses.offsets_B1).row(row).tolist()
    prompts, ends = [played.asked.prompts.row(row).tolist()], [len(tokens)]
    if played.asked.paths is not None:
        ends = played.asked.paths.ends.row(row).tolist()
        others = played.asked.paths.prompts.row(row).tolist()
        cuts = [0, *played.asked.paths.prompt_ends.row(row).tolist()]
        prompts += [others[first:end] for first, end in zip(cuts, cuts[1:], strict=False)]
    starts = [0, *ends[:-1]]
    return [
        (prompt, tokens[first:end], mask[first:end]) for prompt, first, end in zip(prompts, starts, ends, strict=True)
    ]


def of_paths(reply: EngineResponses, row: int) -> tuple[Counter[Tokens], Counter[Tokens]]:
    """A sample's conversations, and each token that is learnt from, by all that is before it."""
    wholes, learnt = Counter[Tokens](), Counter[Tokens]()
    for prompt, tokens, mask in paths_of(reply, row):
        whole = (*prompt, *tokens)
        wholes[whole] += 1
        learnt.update(whole[: len(prompt) + place + 1] for place, own in enumerate(mask) if own)
    return wholes, learnt


def of_branches(trace: dict[str, Any]) -> tuple[Counter[Tokens], Counter[Tokens]]:
    """The same of a trace: its branches, and each token that verifiers says was sampled."""
    wholes, sampled = Counter[Tokens](), Counter[Tokens]()
    for branch in trace["branches"]:
        tokens = tuple(branch["tokens"])
        wholes[tokens] += 1
        places = zip(branch["sampled"], branch["new"], strict=True)
        sampled.update(tokens[: place + 1] for place, (own, new) in enumerate(places) if own and new)
    return wholes, sampled


def told(conversations: tuple[Counter[Tokens], Counter[Tokens]], parts: dict[str, float]) -> str:
    return repr([*(sorted(counted.items()) for counted in conversations), sorted(parts.items())])


@pytest.mark.exhaustive
def test_the_paths_are_the_branches_of_verifiers(
    rank: Ranks, verifiers_python: str, talker: Path, folder: Path
) -> None:
    """Of each episode: the tokens of each, which of them were sampled, the reward and its parts.

    Its agents compact, take a turn again, ask sub-agents one by one and at once. Controls: there are branches that
    share what was sampled, and others that begin by themselves; with one path an episode's is one of the branches, and
    the turns of the others are counted.
    """
    several = played(rank, verifiers_python, talker, folder, 8)
    episodes = several.reply.episodes
    assert episodes is not None and episodes.asked is not None and not episodes.asked.unbridged_B.any()
    rows = range(len(several.traces))
    ours = [told(of_paths(several.reply, row), episodes.parts_B[row]) for row in rows]
    assert sorted(ours) == sorted(told(of_branches(trace), trace["parts"]) for trace in several.traces)
    assert [float(reward) for reward in episodes.rewards_B] == [parts["reward"] for parts in episodes.parts_B]
    kinds = {trace["kind"] for trace in several.traces if _shares_what_was_sampled(trace)}
    assert "retakes" in kinds and all(len(trace["branches"]) > 1 for trace in several.traces)
    assert any(all(branch["new"]) for trace in several.traces for branch in trace["branches"][1:])

    alone = played(rank, verifiers_python, talker, folder, 1)
    assert alone.reply.episodes is not None and alone.reply.episodes.asked is not None
    unbridged = alone.reply.episodes.asked.unbridged_B.tolist()
    for row in rows:
        (whole,) = of_paths(alone.reply, row)[0]
        known = [
            trace["turns"] - len(branch["said"])
            for trace in alone.traces
            for branch in trace["branches"]
            if tuple(branch["tokens"]) == whole
        ]
        assert unbridged[row] in known and unbridged[row] > 0


def _shares_what_was_sampled(trace: dict[str, Any]) -> bool:
    return any(
        own and not new
        for branch in trace["branches"]
        for own, new in zip(branch["sampled"], branch["new"], strict=True)
    )
