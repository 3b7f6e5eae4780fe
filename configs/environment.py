"""The section `environment`: episodes of several turns instead of single responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from configs.section import PositiveInt, Section

if TYPE_CHECKING:
    from configs.schema import TrainConfig


class EnvironmentConfig(Section):
    """Who answers the policy between its turns (docs/environments.md)."""

    type: str = Field(description="'module:Class'; an example is environments.calculator:Calculator")
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")
    max_turns: PositiveInt = Field(4, description="turns of the policy after which an episode is cut")
    timeout_s: float = Field(10.0, gt=0, description="deadline for one call of reset or step, seconds")
    workers: int = Field(2, ge=1, le=64, description="processes of each rollout engine in which episodes live")


def check_environment(config: TrainConfig) -> None:
    """Refuse what does not go together with an environment, or without one.

    Raises:
        ValueError: names the two settings.
    """
    arithmetic = config.data.arithmetic
    if config.environment is None:
        if arithmetic is not None and arithmetic.calls:
            raise ValueError("'data.arithmetic.calls' needs an 'environment' that answers the calls: add one")
        return
    if config.rollout.tensor_parallel > 1:
        raise ValueError(
            "'environment' needs 'rollout.tensor_parallel' 1: the GPUs of one engine must submit the same requests at "
            "the same time, and environments answer when they like"
        )
    if config.rollout.ignore_eos:
        raise ValueError("'rollout.ignore_eos' leaves no end to a turn of an 'environment': remove one of them")
