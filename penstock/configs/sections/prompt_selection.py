"""The sections `data.sampler` and `algorithm.dynamic_sampling`: which prompts are answered, which groups teach.

Left out: the samplers themselves (penstock/data/samplers.py) and the judgement of groups
(penstock/session/rollout/refused_groups.py).
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from penstock.configs.tree.section import PositiveInt, Section, fill, refuse

BUILT_IN_SAMPLERS = ("shuffled", "sequential", "curriculum", "adaptive")


class SamplerConfig(Section):
    """Which prompts an iteration takes."""

    name: str = Field(
        "shuffled",
        description="shuffled: a new order in every epoch; sequential: file order; curriculum: every epoch from easy "
        "to hard; adaptive: more often what is neither mastered nor hopeless; or 'module:function'",
    )
    column: str | None = Field(None, description="column of numbers that says how hard a prompt is (curriculum only)")
    descending: bool | None = Field(
        None, description="the largest numbers are the easiest, as of a success rate (curriculum only; false)"
    )
    half_life: float | None = Field(
        None, gt=0, description="iterations after which an earlier reward counts half (adaptive only; 50)"
    )
    reward_range: tuple[float, float] | None = Field(
        None, description="rewards of failure and of success; those outside count as these (adaptive only; 0 and 1)"
    )
    settings: dict[str, Any] | None = Field(None, description="extra keyword arguments ('module:function' only; none)")

    @model_validator(mode="after")
    def _settings(self) -> Self:
        custom = ":" in self.name
        if not custom and self.name not in BUILT_IN_SAMPLERS:
            raise ValueError(
                f"sampler '{self.name}' is not there: name one of {', '.join(BUILT_IN_SAMPLERS)}, or 'module:function'"
            )
        own = {"curriculum": ("column", "descending"), "adaptive": ("half_life", "reward_range")}
        mine = ("settings",) if custom else own.get(self.name, ())
        every = ("column", "descending", "half_life", "reward_range", "settings")
        refuse(self, tuple(name for name in every if name not in mine), f"with sampler '{self.name}'")
        if self.name == "curriculum":
            if self.column is None:
                raise ValueError("sampler 'curriculum' needs 'column', the column that says how hard a prompt is")
            fill(self, descending=False)
        if self.name == "adaptive":
            fill(self, half_life=50.0, reward_range=(0.0, 1.0))
        if self.reward_range is not None and self.reward_range[0] >= self.reward_range[1]:
            raise ValueError("'reward_range' must be two numbers, the second larger than the first")
        if custom:
            fill(self, settings={})
        return self

    @property
    def built_in(self) -> dict[str, Any]:
        """The settings of a built-in sampler that are in force, by name."""
        return {name: value for name, value in self if name not in ("name", "settings") and value is not None}


class DynamicSamplingConfig(Section):
    """Refuse groups by their rewards, and replace them by answers to further prompts (DAPO)."""

    max_rollouts: PositiveInt = Field(
        4, description="rollouts of one iteration at most, the first one included; 1: nothing is replaced"
    )
    equal_rewards: bool | None = Field(
        None, description="refuse groups whose rewards are all equal; null: where the algorithm compares samples"
    )
    mean_reward: tuple[float, float] | None = Field(
        None, description="refuse groups whose mean reward is below the first or above the second number; null: none"
    )
    function: str | None = Field(None, description="'module:function' that says whether to keep a group; null: none")
    settings: dict[str, Any] | None = Field(None, description="extra keyword arguments for the function")

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.mean_reward is not None and self.mean_reward[0] > self.mean_reward[1]:
            raise ValueError("'mean_reward' must be two numbers, the second not below the first")
        if self.function is None:
            refuse(self, ("settings",), "without 'function'")
        else:
            fill(self, settings={})
        return self

    def check(self, advantage: str, compares: bool) -> None:
        """Fill in what follows from the advantage estimator.

        Args:
            advantage: its name, for messages.
            compares: whether it compares the samples of a prompt.

        Raises:
            ValueError: the section would change nothing, or would take away what teaches.
        """
        judges = self.mean_reward is not None or self.function is not None
        if not compares and (self.equal_rewards or not judges):
            raise ValueError(
                f"'dynamic_sampling' has no use with advantage '{advantage}', which compares no samples: "
                + ("remove 'equal_rewards'" if judges else "give it 'mean_reward' or 'function', or remove it")
            )
        fill(self, equal_rewards=compares)
        if not self.equal_rewards and not judges:
            raise ValueError("'dynamic_sampling' refuses no group: give it 'mean_reward' or 'function', or remove it")
        if self.max_rollouts == 1 and not judges:
            raise ValueError(
                "'dynamic_sampling.max_rollouts' 1 has no effect: groups of equal rewards teach nothing as it is; "
                "use at least 2, or remove 'dynamic_sampling'"
            )
