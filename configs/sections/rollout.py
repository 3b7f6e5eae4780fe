"""Sections of the rollout and of the environment that it is played in."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import Field, model_validator

from configs.sections.sandbox import SandboxConfig
from configs.tree.schedule import ScheduledAboveZero
from configs.tree.section import PositiveInt, Section


class EnvironmentConfig(Section):
    """Who answers the policy between its turns (docs/environments.md)."""

    type: str = Field(description="'module:Class'; an example is penstock.environments.calculator:Calculator")
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")
    max_turns: PositiveInt = Field(4, description="turns of the policy after which an episode is cut")
    timeout_s: float = Field(10.0, gt=0, description="deadline for one call of reset or step, seconds")
    workers: int = Field(2, ge=1, le=64, description="processes of each rollout engine in which episodes live")
    sandbox: SandboxConfig | None = Field(
        None, description="run episodes in a sandbox (bubblewrap); null: with the rights of the training"
    )


class TailConfig(Section):
    """Rollouts end before their longest responses, whose prompts get rounds of their own (docs/asynchrony.md)."""

    extra: float = Field(
        0.25, gt=0, le=4, description="prompts begun beyond rollout.prompts, as a share of it; the last ones wait"
    )
    max_wait: PositiveInt = Field(8, description="iterations after which a prompt that waits is taken in any case")


class CarryConfig(Section):
    """Rollouts end before their longest responses, with which the next policies go on (docs/asynchrony.md)."""

    extra: float = Field(
        0.25, gt=0, le=1, description="prompts under way beyond rollout.prompts, as a share of it; the last ones go on"
    )
    staleness: PositiveInt = Field(
        2, description="updates that the policy may have had since a token of the batch was sampled, at most"
    )


class StreamConfig(Section):
    """The actor's gradient is summed while others are still generated, group by group (docs/asynchrony.md)."""

    portions: int = Field(
        8, ge=2, description="parts of the batch, in the order in which prompts have all their responses"
    )


class RolloutConfig(Section):
    """How experience is generated with vLLM."""

    prompts: PositiveInt = Field(64, description="prompts of one iteration")
    samples: PositiveInt = Field(8, description="responses per prompt")
    tail: TailConfig | None = Field(
        None, description="end a rollout before its longest responses, which are put off; null: wait for all"
    )
    carry: CarryConfig | None = Field(
        None, description="end a rollout before its longest responses, with which the next goes on; null: wait for all"
    )
    stream: StreamConfig | None = Field(
        None,
        description="sum the gradient of what is complete while the rest is generated, on other GPUs; null: update "
        "when all is complete",
    )
    max_response_tokens: PositiveInt = Field(
        1024, description="a response is cut here and counted as truncated, tokens"
    )
    temperature: ScheduledAboveZero[float] = Field(1.0, description="sampling temperature; may follow a schedule")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: keep this probability mass")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0: all")
    ignore_eos: bool = Field(False, description="always generate max_response_tokens (benchmarks)")
    tensor_parallel: PositiveInt = Field(1, description="GPUs that one rollout engine spreads over")
    max_sequences: PositiveInt | None = Field(
        None, description="sequences that one engine decodes at a time; null: its share of them, from 256 to 1024"
    )
    reproducible: bool | None = Field(
        None,
        description="every request has its own random stream and every engine a fixed share of the prompts: the same "
        "tokens whatever the number of ranks, up to rounding; slower on a GPU; null: true on CPU, false on GPU",
    )
    kv_cache_gib: float = Field(0.0, ge=0, description="KV cache of one engine, GiB; 0: chosen from free memory")
    sleep: bool | None = Field(
        None,
        description="give the KV cache's memory to training between rollouts, where they share a GPU; false: keep it; "
        "null: keep it if the memory estimate has room for it beside the updates (no effect on CPU)",
    )
    cuda_graphs: bool = Field(True, description="capture CUDA graphs on a GPU (no effect on CPU)")
    compare_every: PositiveInt = Field(
        50,
        description="iterations from one comparison of vLLM's and the actor's log-probs to the next; there is also one "
        "at the start and after the first iteration",
    )
    max_logprob_gap: float | None = Field(
        None,
        gt=0,
        description="a larger mean difference of those log-probs stops the run; null: 0.1 in bfloat16, 1e-4 in float32",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [name for name in ("tail", "carry", "stream") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ValueError(
                f"'{ways[0]}' and '{ways[1]}' exclude each other: each is a way of its own with the longest responses; "
                "remove one"
            )
        if self.stream is not None and self.stream.portions > self.prompts:
            raise ValueError(
                f"'stream.portions' ({self.stream.portions}) must not exceed 'prompts' ({self.prompts}): a portion has "
                "whole groups"
            )
        return self

    @property
    def prompts_under_way(self) -> int:
        """Prompts whose responses are generated at a time."""
        return self.prompts if self.carry is None else self.prompts_begun

    @property
    def prompts_begun(self) -> int:
        """Prompts that a rollout begins or goes on with, of which `prompts` make the batch."""
        beyond = self.tail or self.carry
        return self.prompts if beyond is None else self.prompts + math.ceil(beyond.extra * self.prompts)
