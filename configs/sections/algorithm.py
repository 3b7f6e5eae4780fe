"""The section `algorithm`: how experience becomes a gradient.

Names, which settings apply to them and their defaults come from the registry of algorithms, so they cannot disagree
with the functions; types, bounds and descriptions are here.

Every setting has one source: of a function of ours the field of its name, of a user's function the mapping `settings`.
So names of the two kinds may be equal and do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from algorithms.advantages import ADVANTAGES
from algorithms.algorithm import Need
from algorithms.discovery import settings
from algorithms.policy_losses import CHOICES, POLICY_LOSSES
from algorithms.registry import ALGORITHMS, has_ratio, is_own, needs, own_settings_of, settings_of
from configs.sections.correction import CorrectionConfig
from configs.sections.sampling import DynamicSamplingConfig
from configs.tree.schedule import Scheduled
from configs.tree.section import PositiveInt, Section, fill, refuse
from penstock.base.errors import UserError
from penstock.usercode.imports import nearest


def _own(name: str) -> str:
    if not is_own(name):
        raise ValueError("a function of yours, 'module:function'")
    return name


if TYPE_CHECKING:
    AlgorithmName = str
    AdvantageName = str
    PolicyLossName = str
else:  # the registry knows the names, so that a file is all that a new algorithm takes
    AlgorithmName = Literal[tuple(ALGORITHMS)]
    AdvantageName = Literal[tuple(ADVANTAGES)] | Annotated[str, AfterValidator(_own)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)] | Annotated[str, AfterValidator(_own)]

# Every setting of any advantage estimator or policy loss; each is a field of AlgorithmConfig.
ALGORITHM_SETTINGS = tuple(
    dict.fromkeys(name for advantage in ADVANTAGES for loss in POLICY_LOSSES for name in settings_of(advantage, loss))
)


# The other fields of AlgorithmConfig: no function of ours can have a setting of such a name.
COMMON = (
    *("name", "advantage", "policy_loss", "settings", "mini_batches", "epochs", "aggregation"),
    *("entropy_coefficient", "kl", "dynamic_sampling", "correction"),
)


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


class AlgorithmConfig(Section):
    """How experience becomes a gradient. A name stands for an advantage estimator, a policy loss and their settings."""

    name: AlgorithmName = Field("grpo", description="see docs/algorithms.md")
    advantage: AdvantageName | None = Field(
        None, description="advantage estimator, or a function of yours as 'module:function'; null: the algorithm's own"
    )
    policy_loss: PolicyLossName | None = Field(
        None, description="policy loss, or a function of yours as 'module:function'; null: the algorithm's own"
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of functions of yours; theirs alone, not those below"
    )
    mini_batches: PositiveInt = Field(1, description="optimizer steps per pass over the experience")
    epochs: PositiveInt = Field(1, description="passes over the experience of one iteration")
    aggregation: (
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        | None
    ) = Field(
        None, description="how token losses become one loss, over the whole mini-batch; null: the algorithm's own"
    )
    entropy_coefficient: Scheduled[float] = Field(0.0, description="weight of the entropy bonus")
    kl: KLConfig | None = Field(
        None, description="pull towards the reference policy; null: none, no reference is loaded"
    )

    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="replace groups by their rewards, above all those from which nothing is learnt; null: none"
    )
    correction: CorrectionConfig | None = Field(
        None, description="measure and correct that the rollout engine's policy is not quite the trainer's; null: off"
    )

    # Settings of advantage estimators and policy losses: null stands for the algorithm's own value, and is refused
    # otherwise where neither has that setting. Their defaults are those of the functions in algorithms/.
    normalize_by_std: bool | None = Field(None, description="divide by the standard deviation of the prompt's group")
    gamma: float | None = Field(None, ge=0, le=1, description="discount per token")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="bias against variance of GAE")
    whiten: bool | None = Field(None, description="normalise advantages over the batch")
    part_weights: dict[str, float] | None = Field(
        None, description="weights of the reward's parts by name, others are left out; null: all parts, weight 1"
    )
    accept_reward: float | None = Field(None, description="responses of at least this reward are imitated")
    accept_best: PositiveInt | None = Field(
        None, description="responses to a prompt that are imitated, the best; ties go together"
    )
    clip_low: Scheduled[float] | None = Field(None, description="the ratio is clipped below 1 - clip_low")
    clip_high: Scheduled[float] | None = Field(None, description="the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="bound on ratio x advantage for negative advantages; null: off"
    )
    log_clip_low: float | None = Field(None, ge=0, description="a token's log-ratio is clipped below -log_clip_low")
    log_clip_high: float | None = Field(None, ge=0, description="a token's log-ratio is clipped above log_clip_high")
    gate_positive: float | None = Field(None, gt=0, description="steepness of the gate for positive advantages")
    gate_negative: float | None = Field(None, gt=0, description="steepness of the gate for negative advantages")
    covariance_share: float | None = Field(None, gt=0, le=1, description="share of tokens chosen by their covariance")
    covariance_low: float | None = Field(None, description="tokens of a covariance not above it are not chosen")
    covariance_high: float | None = Field(None, description="tokens of a covariance not below it are not chosen")
    covariance_pull: float | None = Field(None, ge=0, description="weight of the pull back on the chosen tokens")
    divergence: Literal["tv", "kl"] | None = Field(None, description="total variation, or Kullback-Leibler")
    divergence_bound: float | None = Field(
        None, gt=0, description="a token beyond it is held back; the paper has 0.15 for tv and 0.05 for kl"
    )
    weight_bound: float | None = Field(None, ge=1, description="the largest ratio that counts as a token's weight")

    @model_validator(mode="after")
    def _settings(self) -> Self:
        named = ALGORITHMS[self.name]
        fill(self, advantage=named.advantage, policy_loss=named.policy_loss, aggregation=named.aggregation)
        applicable = settings_of(*self.functions)
        others = tuple(name for name in ALGORITHM_SETTINGS if name not in applicable)
        for name in set(others) & set(own_settings_of(*self.functions)):
            if getattr(self, name) is not None:
                raise ValueError(f"'{name}' is a setting of your own function here: give it in 'settings'")
        refuse(self, others, f"with advantage '{self.advantage}' and policy loss '{self.policy_loss}'")
        defaults = {name: named.defaults.get(name, default) for name, default in applicable.items()}
        fill(self, **defaults)
        self._fill_own_settings()
        self._refuse_idle_bounds(defaults)
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

    def _refuse_idle_bounds(self, defaults: Mapping[str, Any]) -> None:
        """Refuse settings of a loss, which act on ratios, where every ratio is 1; a resolved tree holds defaults."""
        loss = self.functions[1]
        if self.old_logprobs_needed or self.ratio_to_rollout or is_own(loss):
            return
        for name in settings(POLICY_LOSSES[loss]):
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"'{name}' has no effect {ONE_STEP}: remove it, or take more steps")

    def _fill_own_settings(self) -> None:
        """Lay the given settings over the defaults of the user's functions."""
        own = own_settings_of(*self.functions)
        for name in self.settings:
            if not any(map(is_own, self.functions)):
                raise ValueError("'settings' has no effect: neither 'advantage' nor 'policy_loss' is yours")
            if name not in own:
                raise ValueError(
                    f"'settings' has '{name}', which your function does not take{nearest(name, own)}; "
                    f"it takes: {', '.join(own) or 'none'}"
                )
        values = own | self.settings
        for name, value in values.items():
            if value is Parameter.empty:
                raise ValueError(
                    f"'settings' lacks '{name}', for which your function has no default, or two of them not the same"
                )
            if not isinstance(value, bool | int | float | str | list | dict | None):
                raise ValueError(
                    f"the default of '{name}' is a {type(value).__name__}, which a recipe cannot hold: "
                    "make it a number, text, true or false, null, a list or a mapping"
                )
        object.__setattr__(self, "settings", values)

    def settings_for(self, function: str, names: Iterable[str]) -> dict[str, Any]:
        """Return settings of an estimator or loss: a user's from `settings`, ours from the fields of their names."""
        if is_own(function):
            return {name: self.settings[name] for name in names}
        return {name: getattr(self, name) for name in names}

    @property
    def functions(self) -> tuple[str, str]:
        """Names of the advantage estimator and the policy loss in force."""
        named = ALGORITHMS[self.name]
        return self.advantage or named.advantage, self.policy_loss or named.policy_loss

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
    def on_policy(self) -> bool:
        """Whether every gradient is taken at the policy that generated the experience (one step per iteration)."""
        return self.mini_batches == 1 and self.epochs == 1

    @property
    def old_logprobs_needed(self) -> bool:
        """Whether log-probs of the generating policy are needed: off-policy steps, KL in the reward, the algorithm.

        Where they are not, the old ones are the current ones, and the ratio is exactly 1.
        """
        if self.ratio_to_rollout:
            return False
        asked = "old_logprobs" in self.needs or (self.correction is not None and bool(self.correction.normalize))
        return asked or not self.on_policy or (self.kl is not None and self.kl.place == "reward")


def check_settings(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Check that a recipe can hold every setting of functions of ours.

    Args:
        functions: estimators, losses or their choices, by name.

    Raises:
        UserError: a setting has no field, or the name of a field that means something else.
    """
    for function in functions.values():
        for name in settings(function):
            if name in COMMON or name not in AlgorithmConfig.model_fields:
                what = "another meaning there" if name in COMMON else "no field there"
                raise UserError(
                    f"{function.__module__}.{function.__name__} has the setting '{name}', which a recipe gives in the "
                    f"section 'algorithm', and it has {what}",
                    "rename it"
                    if name in COMMON
                    else "add the field to AlgorithmConfig in configs/sections/algorithm.py",
                )


for _functions in (ADVANTAGES, POLICY_LOSSES, CHOICES):
    check_settings(_functions)
