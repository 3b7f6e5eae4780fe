"""Rank processes that the engine tests share, and what they are asked to build."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.configs.schema import TrainConfig
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.commands.build import Built
from penstock.engines.commands.message import decode_news, decode_reply, encode
from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from penstock.engines.groups.hosts import Hosts
from tests.engines.plain_commands import KINDS, command_of, figures_of, numbered, plain

VOCABULARY, EOS, PAD = 64, 1, 0
INSPECTED = "tests.engines.inspected_worker:InspectedWorker"


@dataclass
class Ranks:
    """A running engine group; the ranks' worker is an `InspectedWorker`."""

    group: EngineGroup
    count: int
    keys: Iterator[int] = field(default_factory=itertools.count)
    usage: list[dict[str, float]] = field(default_factory=list)  # of each rank, by the last command

    @classmethod
    def start(cls, number: int, log_dir: Path, hosts: Hosts | None = None, worker: str = INSPECTED) -> Ranks:
        """Spawn the ranks, on a host of their own or on those of others, and return at once."""
        spec = GroupSpec(
            name="main",
            roles=("actor", "rollout"),
            devices=(RankDevice(None),) * number,
            log_dir=log_dir,
            start_timeout_s=200.0,
            command_timeout_s=200.0,
            heartbeat_timeout_s=100.0,
            worker=worker,
        )
        return cls(EngineGroup(spec, hosts), number)

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        """Run a command on every rank; replies in rank order, without what it used.

        A command of the flow has its own reply, of an update the figures; an inspection a dict.
        """
        return self.ask_each(command, [arguments] * self.count)

    def ask_each(
        self, command: str, per_rank: list[dict[str, Any]], on_news: Callable[[Any], None] | None = None, **common: Any
    ) -> list[Any]:
        """Run a command with arguments of each rank's own."""
        common = {**numbered(command, common)}
        arguments = [plain(common | own) for own in per_rank]
        if (kind := KINDS.get(command)) is not None:
            arguments = [encode(command_of(command, own)) for own in arguments]

        def hear(answer: dict[str, Any]) -> None:
            if kind is not None and on_news is not None and "news" in answer:
                on_news(decode_news(kind, answer["news"]))

        answers = self.group.call(command, key=str(next(self.keys)), per_rank=arguments, on_news=hear)
        self.usage = [answer["usage"] for answer in answers]
        replies = [answer["reply"] for answer in answers]
        return replies if kind is None else [figures_of(decode_reply(kind, reply)) for reply in replies]

    def build(self, folder: Path, roles: tuple[str, ...] = ("actor",), **sections: Any) -> Built:
        """Discard what the ranks hold and build `roles` from `folder`; the first rank's reply."""
        self.ask("discard")
        config = TrainConfig(**{**SMALL, "model": {"path": str(folder)}, **sections})
        replies = self.ask("build", config=config.model_dump(mode="json"), folder=str(folder), roles=list(roles))
        assert all(reply == replies[0] for reply in replies), "the ranks built different things"
        built: Built = replies[0]
        return built

    def parameters(self, role: str = "actor") -> dict[str, torch.Tensor]:
        """Every parameter of a trained model; the same on all ranks."""
        replies = self.ask("parameters", role=role)
        for reply in replies[1:]:
            assert all(np.array_equal(reply[name], replies[0][name]) for name in replies[0]), "the ranks differ"
        return {name: torch.from_numpy(value.copy()) for name, value in replies[0].items()}


SMALL: dict[str, Any] = {
    "data": {"max_prompt_tokens": 16},
    "rollout": {"prompts": 8, "samples": 2, "max_response_tokens": 40, "max_sequences": 32},
}


@dataclass(frozen=True)
class Shape:
    """A tiny model with random weights of one of the architectures whose fused layers differ."""

    # "qwen2" has biases in q, k and v; "qwen3" norms queries and keys; "llama" has neither; "phi3" stores q, k, v and
    # gate, up stacked; "phi" has biases everywhere; vLLM has parameters of a dtype of their own for "apertus".
    architecture: str
    tied: bool
    vocabulary: int = VOCABULARY
    intermediate: int = 96
    classes: int = 0  # above 0: a sequence classifier instead of a causal LM
    sliding_window: bool = False

    def write(self, folder: Path) -> None:
        """Write config, weights and tokenizer; the same shape gets the same weights."""
        from transformers import (
            CONFIG_MAPPING,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )

        window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        config = CONFIG_MAPPING[self.architecture](
            vocab_size=self.vocabulary,
            hidden_size=128,
            intermediate_size=self.intermediate,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest that vLLM serves on CPU
            max_position_embeddings=512,
            tie_word_embeddings=self.tied,
            initializer_range=0.15,  # so wide that every wrong weight shows in the log-probs
            eos_token_id=EOS,
            pad_token_id=PAD,
            bos_token_id=None,
            **(window if self.sliding_window else {}),
            **({"num_labels": self.classes} if self.classes else {}),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            kind: Any = AutoModelForSequenceClassification if self.classes else AutoModelForCausalLM
            model = kind.from_config(config)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # zero at first: a lost bias would not show
                    torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
        make_byte_tokenizer(folder)
