"""Sections of the rollout and of the environment that it is played in."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.configs.sections.data import AgentName, once
from penstock.configs.sections.sandbox import SandboxConfig
from penstock.configs.tree.schedule import ScheduledAboveZero
from penstock.configs.tree.section import PositiveInt, Section, fill


class EnvironmentConfig(Section):
    """Who answers the policy between its turns (docs/environments.md)."""

    type: str = Field(description="'module:Class'; an example is penstock.environments.calculator:Calculator")
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")
    agents: list[AgentName] | None = Field(
        None,
        min_length=2,
        description="names of the agents of a game, as its class has them: all are the policy, each has conversations "
        "and rewards of its own; null: the policy is one",
    )
    max_turns: PositiveInt = Field(4, description="turns of the policy after which an episode is cut")
    max_paths: int = Field(
        1,
        ge=1,
        le=256,
        description="conversations of an agent's episode that are learnt from, where it branches, compacts or begins "
        "anew; turns of further ones are answered alone",
    )
    tool_parser: str | None = Field(
        None,
        description="who finds tool calls in a turn: a parser of vLLM's, by its name there (--tool-call-parser); "
        "null: hermes, for Qwen2.5, Qwen3 and others that write JSON between <tool_call> and </tool_call>",
    )
    timeout_s: float = Field(10.0, gt=0, description="deadline for one call of reset or step, seconds")
    workers: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processes of each rollout engine in which episodes live; null: one per 2 of its CPU cores, 2 to 8",
    )
    sandbox: SandboxConfig | None = Field(
        None, description="run episodes in a sandbox (bubblewrap); null: with the rights of the training"
    )

    @model_validator(mode="after")
    def _once(self) -> Self:
        once("agents", self.agents or [])
        return self


class TailConfig(Section):
    """Rollouts end before their longest responses, whose prompts get rounds of their own (docs/asynchrony.md)."""

    extra: float = Field(
        0.25, gt=0, le=4, description="prompts begun beyond rollout.prompts, as a share of it; the last ones wait"
    )
    max_wait: PositiveInt = Field(8, description="iterations after which a prompt that waits is taken in any case")
    deferrals: PositiveInt = Field(1, description="how often a prompt may be put off before a round takes it")


class CarryConfig(Section):
    """Rollouts end before their longest responses, with which the next policies go on (docs/asynchrony.md)."""

    extra: float = Field(
        0.25, gt=0, le=1, description="prompts under way beyond rollout.prompts, as a share of it; the last ones go on"
    )
    staleness: PositiveInt = Field(
        2, description="updates that the policy may have had since a token of the batch was sampled, at most"
    )
    max_wait: PositiveInt | None = Field(
        None,
        description="put prompts off that are not complete by then, and begin them anew together once the first has "
        "waited for so many iterations; null: wait for them",
    )
    keep_kv_cache: bool = Field(
        False,
        description="keep keys and values of older weights for responses that go on; false: compute them again with "
        "the new ones",
    )

    @model_validator(mode="after")
    def _waits(self) -> Self:
        if self.max_wait is not None and self.max_wait <= self.staleness:
            raise ValueError(
                f"'max_wait' ({self.max_wait}) has to exceed 'staleness' ({self.staleness}): a prompt is put off when "
                "it has been under way for as many iterations as that"
            )
        return self


class StreamConfig(Section):
    """The actor learns while responses are generated (docs/asynchrony.md).

    At staleness 0 the gradient is summed group by group as they are complete, on GPUs of its own or on those that
    generate. From 1 on the rollout has a group of its own: the next one begins as soon as the batch is complete, and
    gets new weights between two of its decoding steps.
    """

    staleness: int = Field(
        0, ge=0, description="updates that the policy may have had since a token of the batch was sampled, at most"
    )
    portions: int | None = Field(
        None,
        ge=2,
        description="with staleness 0: parts of the batch, in the order in which prompts have all their responses; "
        "null: 8",
    )
    extra: float | None = Field(
        None,
        ge=0,
        le=1,
        description="with staleness 2 or more: prompts under way beyond rollout.prompts, as a share of it; the last "
        "ones go on under the next policies; null: 0.25",
    )

    keep_kv_cache: bool = Field(
        False,
        description="with staleness: keep keys and values of older weights for responses that go on; false: compute "
        "them again with the new ones",
    )

    @model_validator(mode="after")
    def _in_force(self) -> Self:
        if self.staleness and self.portions is not None:
            raise ValueError("'portions' has no effect with 'staleness', where a batch is complete: remove it")
        if self.staleness < 2 and self.extra is not None:
            raise ValueError("'extra' has no effect with 'staleness' below 2, where no prompt goes on: remove it")
        if not self.staleness:
            if self.keep_kv_cache:
                raise ValueError("'keep_kv_cache' has no effect at 'staleness' 0, where no weights change: remove it")
            fill(self, portions=8)
        elif self.staleness > 1:
            fill(self, extra=0.25)
        return self


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
        description="update the actor while responses are generated; null: one after the other",
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
    weights: Literal["auto", "fp8"] = Field(
        "auto",
        description="compute linear layers in 8 bits (e4m3, a scale for each row and token), on Hopper GPUs, with "
        "copies that each reshard makes of the actor's weights; auto: with these themselves",
    )
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
        description="a larger mean difference of those log-probs stops the run; null: 0.1 in bfloat16, 1e-4 in "
        "float32, 0.5 in FP8",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [name for name in ("tail", "carry", "stream") if getattr(self, name) is not None]
        if len(ways) > 1 and not (len(ways) == 2 and self.in_portions):
            raise ValueError(
                f"'{ways[0]}' and '{ways[1]}' exclude each other: each is a way of its own with the longest responses; "
                "remove one"
            )
        if self.portions > self.prompts:
            raise ValueError(
                f"'stream.portions' ({self.portions}) must not exceed 'prompts' ({self.prompts}): a portion has "
                "whole groups"
            )
        return self

    @model_validator(mode="after")
    def _keeps_awake(self) -> Self:
        if self.carry is not None and self.carry.keep_kv_cache and self.sleep:
            raise ValueError("'sleep' would empty the cache that 'carry.keep_kv_cache' keeps: remove one of them")
        return self

    @model_validator(mode="after")
    def _puts_off_again(self) -> Self:
        """Refuse deferrals that no prompt comes to, or with which a prompt would wait for longer than it may."""
        if self.tail is None or self.tail.deferrals == 1:
            return self
        tail, put_off = self.tail, self.prompts_begun - self.prompts
        if put_off > self.prompts:
            raise ValueError(
                f"with tail.extra={tail.extra:g} a round puts off more prompts than a long one takes, and with several "
                "deferrals some would outlast tail.max_wait; give tail.extra=1 or less, or tail.deferrals=1"
            )
        rounds = math.ceil(self.prompts_begun / put_off)  # that leave enough prompts for one that begins them again
        earliest = sum(rounds**times for times in range(1, tail.deferrals))
        if earliest >= tail.max_wait:
            raise ValueError(
                f"no prompt is put off {tail.deferrals} times within tail.max_wait={tail.max_wait} iterations: enough "
                f"wait after {earliest}; give tail.max_wait={earliest + 1} or more, or fewer deferrals"
            )
        return self

    @property
    def in_portions(self) -> bool:
        """Whether the gradient is summed of what is complete while the rest is generated."""
        return self.stream is not None and not self.stream.staleness

    @property
    def portions(self) -> int:
        """Parts of the batch whose gradients are summed; 1: it is updated on as a whole."""
        return (self.stream.portions if self.stream is not None else None) or 1

    @property
    def begins_ahead(self) -> bool:
        """Whether a rollout begins before the update on the one before, and has its weights changed on the way."""
        return self.stream is not None and self.stream.staleness > 0

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether responses that go on keep keys and values of older weights."""
        beyond = self.carry or self.stream
        return beyond is not None and beyond.keep_kv_cache

    @property
    def repeatable(self) -> bool:
        """Whether a rollout that begins again could sample the same tokens.

        It could not where its weights change on the way, at another moment each time, or where it goes on with keys of
        older weights, which only the engine has that made them.
        """
        return not (self.begins_ahead or self.keeps_kv_cache)

    @property
    def goes_on(self) -> bool:
        """Whether responses go on under the next policies."""
        return self.carry is not None or self.begins_ahead

    @property
    def rounds_under_way(self) -> int:
        """Rollouts after its first in which a prompt may be under way; it is waited for in the last of them.

        One that begins ahead may sample with a policy that is an update older already.
        """
        if self.stream is not None:
            return max(0, self.stream.staleness - 1)
        return 0 if self.carry is None else self.carry.staleness

    @property
    def max_wait(self) -> int | None:
        """Iterations after which prompts are begun anew that were too long to go on; None: they are waited for."""
        return None if self.carry is None else self.carry.max_wait

    @property
    def prompts_under_way(self) -> int:
        """Prompts whose responses are generated at a time."""
        return self.prompts if self.tail is not None else self.prompts_begun

    @property
    def prompts_begun(self) -> int:
        """Prompts that a rollout begins or goes on with, of which `prompts` make the batch."""
        beyond = self.tail or self.carry or self.stream
        extra = None if beyond is None else beyond.extra
        return self.prompts + math.ceil((extra or 0.0) * self.prompts)
