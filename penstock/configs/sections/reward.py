"""Section of the reward: where it comes from and what is done to it before the algorithm sees it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from penstock.base.bounds import LARGEST_REWARD
from penstock.configs.sections.reward_servers import JudgeConfig, ServiceConfig
from penstock.configs.sections.sandbox import SandboxConfig
from penstock.configs.tree.section import PositiveInt, Section, Share


class OverlongConfig(Section):
    """The soft punishment of responses that come near `rollout.max_response_tokens` (DAPO); training alone."""

    buffer_tokens: PositiveInt = Field(description="the penalty grows over the last tokens before the limit, tokens")
    penalty: float = Field(1.0, gt=0, le=LARGEST_REWARD, description="what a response of full length loses")


class RewardConfig(Section):
    """What a response is worth: a Python function, a reward model in this training, or a server that others share."""

    function: str | None = Field(
        None,
        description="'module:function'; built in: penstock.rewards.builtin:exact_match, :last_number, :matches_regex, "
        "penstock.rewards.code:passes_tests",
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments for the function")
    model: str | None = Field(None, description="Hugging Face sequence-classification folder that scores responses")
    judge: JudgeConfig | None = Field(None, description="a language model behind a server that judges responses")
    service: ServiceConfig | None = Field(None, description="a reward model behind a server that scores responses")
    timeout_s: float = Field(10.0, gt=0, description="deadline for one call of the function, seconds")
    workers: int | None = Field(
        None, ge=1, le=64, description="processes that run the function or read a judge; null: one per 2 cores, 2 to 32"
    )
    sandbox: SandboxConfig | None = Field(
        None, description="run the function in a sandbox (bubblewrap); null: with the rights of the training"
    )
    failure_value: float = Field(
        0.0,
        ge=-LARGEST_REWARD,
        le=LARGEST_REWARD,
        description="reward of a sample whose call raised, timed out, or gave what is no number within +-1e12",
    )
    max_failure_share: Share = Field(0.1, description="the run stops when more than this share of a batch failed")
    overlong: OverlongConfig | None = Field(None, description="soft punishment of long responses; null: none")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in REWARD_SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(map(repr, given))} exclude each other: keep one")
        if self.function is None and self.settings:
            raise ValueError("'settings' has no effect without 'function': remove it")
        for name in ("timeout_s", "workers", "sandbox") if given and given[0] not in WITH_WORKERS else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"'{name}' has no effect with '{given[0]}': remove it")
        return self

    @property
    def kind(self) -> str | None:
        """Which source of rewards is configured, one of `REWARD_SOURCES`; with an environment there need be none."""
        return next((name for name in REWARD_SOURCES if getattr(self, name) is not None), None)

    @property
    def scored_by_flow(self) -> bool:
        """Whether the flow's process asks for the rewards; those of a reward model come from its engine group."""
        return self.kind not in (None, "model")

    @property
    def source(self) -> str:
        """What gives the rewards, for messages."""
        if self.kind is None:
            return "reward"
        value = getattr(self, self.kind)
        name = value if isinstance(value, str) else getattr(value, "model", None)
        return f"reward.{self.kind}" if name is None else f"reward.{self.kind} '{name}'"


REWARD_SOURCES = ("function", "model", "judge", "service")
WITH_WORKERS = ("function", "judge")  # sources that run a function in worker processes
