"""The section `algorithm`: how experience becomes a gradient.

Names come from the registry of algorithms. The settings of an estimator and a loss, ours or a user's, are in
`settings`. Their names, types, bounds, defaults and descriptions come from the functions themselves, so that a new
algorithm with a new setting takes no line here.

Left out: how settings are checked (penstock/configs/sections/function_settings.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.declarations.algorithm import Need
from penstock.algorithms.declarations.settings import Setting, settings
from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.algorithms.registry import (
    ALGORITHMS,
    advantage_named,
    choice_named,
    every_setting,
    has_ratio,
    is_own,
    is_separable,
    needs,
    policy_loss_named,
    settings_of,
)
from penstock.configs.sections.correction import CorrectionConfig
from penstock.configs.sections.function_settings import FunctionSettings, is_scheduled, own_function
from penstock.configs.sections.prompt_selection import DynamicSamplingConfig
from penstock.configs.tree.annotations import Knows
from penstock.configs.tree.schedule import Scheduled, value_at
from penstock.configs.tree.section import PositiveInt, Section, fill, refuse

if TYPE_CHECKING:
    AlgorithmName = str
    AdvantageName = str
    PolicyLossName = str
else:  # the registry knows the names, so that a file is all that a new algorithm takes
    AlgorithmName = Literal[tuple(ALGORITHMS)]
    AdvantageName = Literal[tuple(ADVANTAGES)] | Annotated[str, AfterValidator(own_function)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)] | Annotated[str, AfterValidator(own_function)]

SETTINGS = FunctionSettings("AlgorithmSettings", every_setting(), scheduled=True)


ONE_STEP = "with one step per iteration ('mini_batches' 1, 'epochs' 1), where nothing has moved yet"


class KLConfig(Section):
    """The pull towards the reference policy: the actor's starting point, or the actor some iterations ago."""

    place: Literal["reward", "loss"] = Field(
        "loss", description="subtract the KL from the reward, or add it to the loss"
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "full"] = Field(
        "k3",
        description="KL(actor, reference) estimated from sampled tokens (+: with the gradient of k2); full: the KL "
        "itself, over the whole vocabulary",
    )
    coefficient: Scheduled[float] = Field(0.001, description="weight of the KL term; the start value if adaptive")
    target: float | None = Field(
        None, gt=0, description="KL per token that an adaptive coefficient steers to; null: fixed"
    )
    horizon: float | None = Field(None, gt=0, description="samples over which the adaptive coefficient reacts (10000)")
    ceiling: float | None = Field(None, gt=0, description="the adaptive coefficient never exceeds this (1.0)")
    refresh_every: PositiveInt | None = Field(
        None, description="iterations after which the reference becomes a copy of the actor; null: never"
    )

    @model_validator(mode="after")
    def _controller(self) -> Self:
        if self.place == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"estimator '{self.estimator}' differs from '{self.estimator[:-1]}' in its gradient alone, "
                "which a KL in the reward has not: remove the '+'"
            )
        if self.target is None:
            refuse(self, ("horizon", "ceiling"), "without 'target' (a fixed coefficient)")
            return self
        if isinstance(self.coefficient, dict):
            raise ValueError("'coefficient' is a schedule and 'target' makes it adaptive: remove one")
        fill(self, horizon=10_000.0, ceiling=1.0)
        return self


def _functions(name: str, advantage: str | None, policy_loss: str | None) -> tuple[str, str]:
    named = ALGORITHMS[name]
    return advantage or named.advantage, policy_loss or named.policy_loss


def _settings_taken(name: str, advantage: str, policy_loss: str) -> dict[str, Setting]:
    """Return the settings of an estimator and a loss, with the defaults of the algorithm of that name."""
    own = ALGORITHMS[name].defaults
    taken = settings_of(advantage, policy_loss)
    return {key: replace(setting, default=own.get(key, setting.default)) for key, setting in taken.items()}


class AlgorithmConfig(Section):
    """How experience becomes a gradient. A name stands for an advantage estimator, a policy loss and their settings."""

    name: AlgorithmName = Field("grpo", description="see docs/algorithms.md")
    advantage: AdvantageName | None = Field(
        None, description="advantage estimator, or a function of yours as 'module:function'; null: the algorithm's own"
    )
    policy_loss: PolicyLossName | None = Field(
        None, description="policy loss, or a function of yours as 'module:function'; null: the algorithm's own"
    )
    settings: Annotated[dict[str, Any], Knows(SETTINGS.known)] = Field(
        default_factory=dict,
        description="settings of the advantage estimator and the policy loss, those of yours too; numbers may be "
        "schedules",
    )
    mini_batches: PositiveInt = Field(1, description="optimizer steps per pass over the experience")
    mini_batch_of: Literal["samples", "prompts"] | None = Field(
        None,
        description="what several mini-batches are drawn from: samples one by one, or prompts with all their samples; "
        "null: samples",
    )
    epochs: PositiveInt = Field(1, description="passes over the experience of one iteration")
    aggregation: (
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        | None
    ) = Field(
        None, description="how token losses become one loss, over the whole mini-batch; null: the algorithm's own"
    )
    entropy_coefficient: Scheduled[float] = Field(0.0, description="weight of the entropy bonus")
    router_loss_coefficient: float = Field(
        0.0, ge=0, description="weight of the loss that has a mixture's experts used evenly; mixtures of experts only"
    )
    kl: KLConfig | None = Field(
        None, description="pull towards the reference policy; null: none, no reference is loaded"
    )

    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="replace groups by their rewards, above all those from which nothing is learnt; null: none"
    )
    correction: CorrectionConfig | None = Field(
        None,
        description="measure and correct that the rollout engine's policy is not quite the trainer's; null: off, but "
        "with rollout.carry, and rollout.stream from staleness 1 on, weights of single tokens",
    )

    @field_validator("settings")
    @classmethod
    def _in_force(cls, given: dict[str, Any], before: ValidationInfo) -> dict[str, Any]:
        if not {"name", "advantage", "policy_loss"} <= before.data.keys():  # one of them is wrong, and is reported
            return given
        advantage, loss = _functions(before.data["name"], before.data["advantage"], before.data["policy_loss"])
        taken = _settings_taken(before.data["name"], advantage, loss)
        return SETTINGS.checked(given, taken, f"advantage '{advantage}' and policy loss '{loss}'")

    @model_validator(mode="after")
    def _together(self) -> Self:
        named = ALGORITHMS[self.name]
        fill(self, advantage=named.advantage, policy_loss=named.policy_loss, aggregation=named.aggregation)
        self._refuse_idle_bounds()
        if self.mini_batches == 1:
            refuse(self, ("mini_batch_of",), "with one mini-batch, which holds all samples")
        else:
            fill(self, mini_batch_of="samples")
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.check(self.functions[0], compares="group" in self.needs)
        if self.ratio_to_rollout and not has_ratio(self.functions[1]):
            raise ValueError(
                f"'correction.proximal: rollout' has no effect with policy loss '{self.policy_loss}', which has no "
                "ratio: use 'correction.weights'"
            )
        if self.ratio_to_rollout and self.full_kl and not self.kl_in_loss:
            raise ValueError(
                "'kl.estimator: full' in the reward needs the trainer's own pass over the experience, which "
                "'correction.proximal: rollout' leaves out: use 'kl.place: loss', or another estimator"
            )
        if {"reward_parts", "whole_rewards"} & self.needs and self.kl is not None and self.kl.place == "reward":
            raise ValueError(
                f"'kl.place: reward' has no effect with advantage '{self.advantage}', which reads what whole responses "
                "earn alone: use 'kl.place: loss'"
            )
        return self

    def _refuse_idle_bounds(self) -> None:
        """Refuse settings of a loss, which act on ratios, where every ratio is 1; a resolved tree holds defaults."""
        advantage, loss = self.functions
        if self.old_logprobs_needed or self.ratio_to_rollout or is_own(loss) or not has_ratio(loss):
            return
        taken, shared = _settings_taken(self.name, advantage, loss), settings(advantage_named(advantage))
        for name in settings(policy_loss_named(loss)):
            if name not in shared and self.settings[name] != taken[name].default:
                raise ValueError(f"'algorithm.settings.{name}' has no effect {ONE_STEP}: remove it, or take more steps")

    @property
    def scheduled(self) -> frozenset[str]:
        """Names of the settings that may be schedules, and may change during a run."""
        return frozenset(name for name, setting in settings_of(*self.functions).items() if is_scheduled(setting))

    def settings_at(self, iteration: int) -> dict[str, Any]:
        """Return `settings` with the values that schedules have at an iteration."""
        scheduled = self.scheduled
        return {
            name: value_at(value, iteration) if name in scheduled else value for name, value in self.settings.items()
        }

    @property
    def functions(self) -> tuple[str, str]:
        """Names of the advantage estimator and the policy loss in force."""
        return _functions(self.name, self.advantage, self.policy_loss)

    @property
    def needs(self) -> frozenset[Need]:
        """What the advantage estimator and the policy loss need beyond rewards and the current log-probs."""
        return needs(*self.functions)

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are computed from a critic's values."""
        return "critic" in self.needs

    @property
    def full_kl(self) -> bool:
        """Whether the KL to the reference is over the whole vocabulary."""
        return self.kl is not None and self.kl.estimator == "full"

    @property
    def kl_in_loss(self) -> bool:
        """Whether a KL to the reference is part of the loss."""
        return self.kl is not None and self.kl.place == "loss"

    @property
    def reference_pass(self) -> bool:
        """Whether the reference has a pass of its own; a full KL in the reward makes it a part of the actor's."""
        return self.kl is not None and (self.kl_in_loss or not self.full_kl)

    @property
    def ratio_to_rollout(self) -> bool:
        """Whether the rollout's own log-probs are the old ones."""
        return self.correction is not None and self.correction.proximal == "rollout"

    @property
    def kl_before_update(self) -> bool:
        """Whether the mean KL to the reference is known before the update, from columns."""
        if self.kl is None:
            return False
        sampled = not self.full_kl and (self.old_logprobs_needed or self.ratio_to_rollout)
        return self.kl.place == "reward" or sampled

    @property
    def on_policy(self) -> bool:
        """Whether every gradient is taken at the policy that generated the experience (one step per iteration)."""
        return self.mini_batches == 1 and self.epochs == 1

    @property
    def separable(self) -> bool:
        """Whether advantages and loss of some groups need nothing of the others but their numbers of tokens."""
        advantage, loss = self.functions
        batchwide = choice_named(loss) is not None or (self.correction is not None and bool(self.correction.normalize))
        return is_separable(advantage, self.settings) and not batchwide

    @property
    def old_logprobs_needed(self) -> bool:
        """Whether log-probs of the generating policy are needed: off-policy steps, KL in the reward, the algorithm.

        Where they are not, the old ones are the current ones, and the ratio is exactly 1.
        """
        if self.ratio_to_rollout:
            return False
        asked = "old_logprobs" in self.needs or (self.correction is not None and bool(self.correction.normalize))
        return asked or not self.on_policy or (self.kl is not None and self.kl.place == "reward")
