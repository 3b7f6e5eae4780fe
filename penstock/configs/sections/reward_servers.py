"""Rewards from servers that several trainings share: a generative judge, or a reward model behind vLLM's server.

Left out: what the servers have to be asked (penstock/rewards/judge.py, penstock/rewards/service.py) and whether they
answer (penstock/rewards/server.py).
"""

from __future__ import annotations

import re
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.configs.tree.section import PositiveInt, Section

OWN_FIELDS = ("model", "messages", "prompt", "max_tokens", "temperature", "stream", "n")


class RewardServer(Section):
    """How a server is reached, and how much it is asked at a time."""

    url: str = Field(description="address of the server, e.g. http://127.0.0.1:8000")
    model: str = Field(description="name by which the server knows the model; it must offer it in /v1/models")
    api_key_env: str | None = Field(
        None,
        description="environment variable with the server's API key, read where the flow runs; null: no key",
    )
    timeout_s: float = Field(120.0, gt=0, description="deadline for one request, seconds")
    retries: int = Field(
        5, ge=0, le=20, description="further attempts of a request after a lost connection, a timeout, 429 or 5xx"
    )

    @field_validator("api_key_env")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not value.isidentifier():
            raise ValueError("name the environment variable that holds the key; the key itself stands in no recipe")
        return value

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"'{value}' is no address of a server: write it as http://HOST:PORT")
        if parts.username or parts.password:
            raise ValueError("a password in 'url' would be recorded with the run: use 'api_key_env'")
        return value


class JudgeConfig(RewardServer):
    """A language model that reads a response and writes its opinion, out of which a number is read."""

    template: str = Field(
        description="what the judge is asked; {response}, {prompt}, {prompt_id} and columns of the data stand in braces"
    )
    chat: bool = Field(True, description="ask as one user message; false: the template is a text to be continued")
    pattern: str | None = Field(
        None, description="regular expression with one group, the number; the last match in the judge's text counts"
    )
    parser: str | None = Field(
        None, description="'module:function' instead: a reward function whose `response` is the judge's text"
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments for 'parser'")
    bounds: tuple[float, float] | None = Field(
        None, description="smallest and largest number that 'pattern' may find, anything else is a failure; null: any"
    )
    scale: float = Field(1.0, description="the reward is the number that 'pattern' finds, times this")
    max_tokens: PositiveInt = Field(512, description="the judge's text is cut here, tokens")
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the judge; 0: greedy")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="further fields of every request, e.g. {stop: [END]} or chat_template_kwargs"
    )
    concurrency: int = Field(128, ge=1, le=1000, description="requests in flight, which the server batches")

    @model_validator(mode="after")
    def _reading(self) -> Self:
        if (self.pattern is None) == (self.parser is None):
            raise ValueError("give one of 'pattern' and 'parser', which read the number out of the judge's text")
        if self.pattern is not None:
            _check_pattern(self.pattern)
            if self.settings:
                raise ValueError("'settings' has no effect without 'parser': remove it")
        elif self.bounds is not None or self.scale != 1:
            raise ValueError(
                "'bounds' and 'scale' have no effect with 'parser', whose value is the reward: remove them"
            )
        if self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"'bounds' {list(self.bounds)} must be two numbers, the smaller one first")
        if not self.scale:
            raise ValueError("'scale' 0 makes every reward 0")
        return self

    @model_validator(mode="after")
    def _asking(self) -> Self:
        if "{response}" not in self.template:
            raise ValueError("'template' must contain {response}, the place of what is judged")
        if own := [name for name in OWN_FIELDS if name in self.extra]:
            raise ValueError(f"'extra' has '{own[0]}', which is set by a key of its own or always the same: remove it")
        return self


class ServiceConfig(RewardServer):
    """A reward model (a sequence classifier with one label) behind vLLM's server."""

    batch: PositiveInt = Field(32, description="texts of one request")
    concurrency: int = Field(16, ge=1, le=1000, description="requests in flight, which the server batches")


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"'pattern' is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"'pattern' must have one group, the number, not {groups}: write others as (?:...)")
