"""The whole configuration of a training as one pydantic tree; it is also the `train` flow's parameter.

Why one tree: the Prefect UI draws its form from it, `--dry-run` prints it resolved, the run folder keeps it,
the tracker records it, and a key that is unknown or that would change nothing is refused before any engine starts.

Optional settings default to None where their meaning depends on another key (a GAE lambda without a critic);
validation fills them in where they apply and refuses them where they do not. So a resolved tree shows exactly
what is in force, and resolving it a second time changes nothing.

Left out: reading files and composing recipes (penstock/configs/loading/load.py), checks that need the machine or the
data (penstock/checks/training.py).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from penstock.configs.sections.algorithm import ONE_STEP, AlgorithmConfig
from penstock.configs.sections.correction import CorrectionConfig
from penstock.configs.sections.data import DataConfig, check_agents
from penstock.configs.sections.faults import FaultsConfig, check_faults
from penstock.configs.sections.model import ModelConfig
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.rollout import EnvironmentConfig, RolloutConfig
from penstock.configs.sections.run import (
    BUILT_IN_EVALUATORS,
    CheckpointConfig,
    EngineConfig,
    EvaluateConfig,
    GroupConfig,
    HostsConfig,
    RecordConfig,
    Role,
)
from penstock.configs.sections.trainer import ActorConfig, CriticConfig, SftConfig
from penstock.configs.tree.section import PositiveInt, Recipe, fill


class TrainConfig(Recipe):
    """One training: supervised warm-up (optional), then reinforcement learning."""

    name: str = Field(
        "train", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run, part of its folder"
    )
    folder: str = Field("runs", description="directory that receives run folders")
    seed: int = Field(0, ge=0, description="seed of everything random")
    iterations: PositiveInt = Field(100, description="reinforcement-learning iterations")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the actor's starting point")
    data: DataConfig = Field(default_factory=DataConfig, description="prompts")
    sft: SftConfig | None = Field(None, description="supervised warm-up before reinforcement learning; null: none")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="what a response is worth")
    environment: EnvironmentConfig | None = Field(
        None, description="episodes of several turns with an environment; null: single responses"
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="generation of experience")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="from experience to gradient")
    dataflow: str | None = Field(
        None, description="'module:function', the steps of an iteration in an order of yours; null: the usual one"
    )
    actor: ActorConfig = Field(default_factory=ActorConfig, description="training of the policy")
    critic: CriticConfig | None = Field(None, description="training of the value model (ppo only)")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="durable state")
    faults: FaultsConfig = Field(default_factory=FaultsConfig, description="what numerical faults lead to")
    groups: dict[str, GroupConfig] = Field(
        default_factory=dict, description="placement; empty: one group for all roles"
    )
    hosts: HostsConfig | None = Field(None, description="the network between machines; null: there is one machine")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="deadlines and losses of the engine groups")
    record: RecordConfig = Field(default_factory=RecordConfig, description="trackers and samples")

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.algorithm.needs_critic:
            whole = {} if self.actor.optimizer.whole is None else {"zero_stage": self.actor.zero_stage}
            fill(self, critic=CriticConfig(optimizer=self.actor.optimizer, **whole))
        elif self.critic is not None:
            raise ValueError(f"'critic' has no effect with algorithm '{self.algorithm.name}': remove it")
        usual = (None, CriticConfig.model_fields["value_clip"].default)
        if self.critic is not None and self.algorithm.on_policy and self.critic.value_clip not in usual:
            raise ValueError(f"'critic.value_clip' has no effect {ONE_STEP}: remove it, or take more steps")
        check_agents(self.data.agents, self.players, "agent" in self.algorithm.needs, self.algorithm.name)
        if "group" in self.algorithm.needs and self.rollout.samples < 2:
            raise ValueError(
                f"'rollout.samples' must be at least 2 with algorithm '{self.algorithm.name}': "
                "it compares samples of a prompt"
            )
        check_fp8(self)
        if self.rollout.goes_on or self.in_fp8:
            fill(self.algorithm, correction=CorrectionConfig(weights="token"))
        if self.algorithm.correction is not None and (self.rollout.top_p < 1 or self.rollout.top_k):
            raise ValueError(
                "'algorithm.correction' compares whole distributions, and 'rollout.top_p' and 'rollout.top_k' cut the "
                "rollout's: remove them"
            )
        if (overlong := self.reward.overlong) and overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"'reward.overlong.buffer_tokens' ({overlong.buffer_tokens}) must not exceed "
                f"'rollout.max_response_tokens' ({self.rollout.max_response_tokens})"
            )
        self._check_mini_batches()
        if self.sft is None and (self.data.sft or self.data.response):
            raise ValueError("'data.sft' and 'data.response' have no effect without an 'sft' section: remove them")
        for name in ("failure_value", "max_failure_share") if self.reward.model and self.environment is None else ():
            if getattr(self.reward, name) != RewardConfig.model_fields[name].default:
                raise ValueError(f"'reward.{name}' has no effect with 'reward.model': remove it")
        check_faults(self.faults, self.algorithm, self.checkpoint)
        self._check_reference()
        check_environment(self)
        self._check_placement()
        if self.rollout.stream is not None:
            check_stream(self)
        if self.actor.replays:
            check_replay(self)
        check_images(self)
        return self

    def _check_mini_batches(self) -> None:
        """Refuse mini-batches of unequal sizes."""
        of_prompts = self.algorithm.mini_batch_of == "prompts"
        what = "'rollout.prompts'" if of_prompts else "'rollout.prompts' times 'rollout.samples'"
        count = self.rollout.prompts * (1 if of_prompts else self.rollout.samples)
        if count % self.algorithm.mini_batches:
            raise ValueError(
                f"{what} ({count}) must be a multiple of 'algorithm.mini_batches' ({self.algorithm.mini_batches})"
            )

    def _check_reference(self) -> None:
        kl = self.algorithm.kl
        if self.algorithm.full_kl and self.actor.sequence_parallel > 1:
            raise ValueError(
                "'actor.sequence_parallel' does not go with 'algorithm.kl.estimator' full: hidden states of the "
                "reference are not split over ranks; take another estimator, e.g. k3"
            )
        if self.evaluate.evaluators is None:
            names = [name for name in BUILT_IN_EVALUATORS if name != "kl" or kl is not None]
            object.__setattr__(self, "evaluate", self.evaluate.model_copy(update={"evaluators": names}))
        elif kl is None and "kl" in self.evaluate.evaluators:
            raise ValueError(
                "'evaluate.evaluators' has 'kl', and there is no reference: remove it, or add 'algorithm.kl'"
            )
        if kl is None or kl.refresh_every is None:
            return
        if self.actor.lora is not None:
            raise ValueError(
                "'algorithm.kl.refresh_every' does not go with 'actor.lora', where the reference is the model without "
                "its adapters: remove one of them"
            )

    def _check_placement(self) -> None:
        elsewhere = any(group.hosts for group in self.groups.values())
        if elsewhere:
            fill(self, hosts=HostsConfig())
        elif self.hosts is not None:
            raise ValueError("'hosts' has no effect where no group has a 'pool' or 'hosts': remove it")
        if not self.groups:
            return
        held = [role for group in self.groups.values() for role in group.roles]
        needed = self.roles
        if twice := sorted({role for role in held if held.count(role) > 1 and role != "rollout"}):
            raise ValueError(f"'groups' places {', '.join(twice)} twice: one group must hold it")
        generating = [group.roles for group in self.groups.values() if "rollout" in group.roles]
        if len(generating) > 1 and any(roles != ["rollout"] for roles in generating):
            raise ValueError("'groups' places rollout in several groups: each of them must hold it alone")
        if missing := sorted(set(needed) - set(held)):
            raise ValueError(f"'groups' places no {', '.join(missing)}: add it to a group's roles")
        if idle := sorted(set(held) - set(needed)):
            raise ValueError(
                f"'groups' places {', '.join(idle)}, which this algorithm and reward do not use: remove it"
            )
        if all(group.elastic for group in self.groups.values() if "rollout" in group.roles):
            raise ValueError("'groups' has the rollout in elastic groups alone: one of them must stay")
        indices = [index for group in self.groups.values() if not group.hosts for index in group.gpus or []]
        if len(set(indices)) != len(indices):
            raise ValueError("'groups' gives a GPU to two groups: each GPU belongs to one")
        trained = {"actor": self.actor, "critic": self.critic}
        for (role,) in (group.roles for group in self.groups.values() if len(group.roles) == 1):
            if (trainer := trained.get(role)) is not None and trainer.offload_optimizer:
                raise ValueError(f"'{role}.offload_optimizer' has no effect: nothing else is in its group; remove it")

    @property
    def agents(self) -> list[str]:
        """Agents that have a critic each; none where there is one critic, or no critic."""
        if "agent" not in self.algorithm.needs:
            return []
        return self.data.agents.names if self.data.agents is not None else self.players

    @property
    def players(self) -> list[str]:
        """Agents of a game, each of which has a conversation of its own in an episode; none without a game."""
        return (self.environment.agents or []) if self.environment is not None else []

    @property
    def conversations(self) -> int:
        """Rows of experience that an episode makes: one, or with a game one of each agent."""
        return max(1, len(self.players))

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles this training needs, in build order."""
        roles: list[Role] = ["actor"]
        if self.algorithm.needs_critic:
            roles.append("critic")
        if self.algorithm.kl is not None:
            roles.append("reference")
        if self.reward.model is not None:
            roles.append("reward")
        return (*roles, "rollout")

    @property
    def in_fp8(self) -> list[str]:
        """Names of the settings by which the policy computes in FP8."""
        chosen = {"actor.fp8": self.actor.fp8, "rollout.weights": self.rollout.weights == "fp8"}
        return [name for name, is_chosen in chosen.items() if is_chosen]

    @property
    def trains(self) -> bool:
        """Whether engines train the policy; an evaluation only loads models (penstock/configs/evaluation.py)."""
        return True

    @property
    def rollout_apart(self) -> bool:
        """Whether the rollout has a group beside that of the actor."""
        return bool(self.groups) and not any({"actor", "rollout"} <= set(group.roles) for group in self.groups.values())

    @property
    def rollout_alone(self) -> bool:
        """Whether there is a group that does nothing but the rollout."""
        return any(group.roles == ["rollout"] for group in self.groups.values())

    @property
    def learns_beside(self) -> bool:
        """Whether ranks compute with what is complete of a rollout while they generate the rest."""
        return self.rollout.in_portions and not self.rollout_alone

    @property
    def old_logprobs_needed(self) -> bool:
        """Whether log-probs of the generating policy are needed: off-policy steps, KL in the reward, the algorithm."""
        return self.algorithm.old_logprobs_needed


def check_images(config: TrainConfig) -> None:
    """Refuse what nobody has compared yet of rows with images, or what needs images where there are none.

    Raises:
        ValueError: names it.
    """
    tiny = config.model.tiny
    if config.data.image_column is None:
        if tiny is not None and tiny.encoder is not None:
            raise ValueError(
                "'model.tiny.encoder' has nothing to see: give 'data.squares' or 'data.images', or remove it"
            )
        if config.model.train_encoder:
            raise ValueError("'model.train_encoder': rows have no images to train it with: remove it")
        return
    if tiny is not None and tiny.encoder is None:
        raise ValueError("'data' has images, and the tiny model sees none: add 'model.tiny.encoder: {}'")
    trainers = {"actor": config.actor, "sft": config.sft, "critic": config.critic}
    carry, stream = config.rollout.carry, config.rollout.stream
    given = {
        "elastic groups": any(group.elastic for group in config.groups.values()),
        "rollout.carry.keep_kv_cache": carry is not None and carry.keep_kv_cache,
        "rollout.stream.keep_kv_cache": stream is not None and stream.keep_kv_cache,
        "rollout.stream without a group for the rollout": config.learns_beside,
        "environment.agents": bool(config.players),
        "critic.path": config.critic is not None and config.critic.path is not None,
        "reward.model": config.reward.model is not None,
        "rollout.tensor_parallel above 1": config.rollout.tensor_parallel > 1,
        "actor.sequence_parallel": config.actor.sequence_parallel > 1,
        "critic.sequence_parallel": config.critic is not None and config.critic.sequence_parallel > 1,
        **{f"{name}.zero_stage 3": part is not None and part.zero_stage == 3 for name, part in trainers.items()},
    }
    if config.model.train_encoder:
        beside = " beside 'model.train_encoder'"
        given |= {f"{name}.lora{beside}": bool(part and part.lora) for name, part in trainers.items()}
        others = {
            "groups": bool(config.groups),
            "a critic": config.critic is not None,
            "environment": config.environment is not None,
            "rollout.carry": carry is not None,
            "rollout.stream": stream is not None,
            "algorithm.kl.refresh_every": config.algorithm.kl is not None and bool(config.algorithm.kl.refresh_every),
        }
        given |= {f"{name}{beside}": is_given for name, is_given in others.items()}
    if names := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"rows with images do not go with {', '.join(names)}: that trainer and rollout agree there is not shown "
            "yet; remove it"
        )


def check_fp8(config: TrainConfig) -> None:
    """Refuse what does not go with FP8.

    Raises:
        ValueError: names it.
    """
    if config.in_fp8 and config.model.dtype == "float32":
        raise ValueError(
            f"'{config.in_fp8[0]}' in FP8 does not go with 'model.dtype' float32: its kernels take and give bfloat16"
        )
    if config.rollout.weights == "fp8" and config.rollout.tensor_parallel > 1:
        raise ValueError(
            "'rollout.weights' fp8 needs 'rollout.tensor_parallel' 1: of a matrix that several GPUs cut each would "
            "have scales of its own, and the actor has those of the whole matrix"
        )


def check_stream(config: TrainConfig) -> None:
    """Refuse what stands in the way of a rollout beside an update.

    Raises:
        ValueError: names what does not go together.
    """
    if config.dataflow is not None:
        raise ValueError(
            "'rollout.stream' lets steps of several iterations go on side by side, and with a 'dataflow' of yours one "
            "follows the other: remove one of them"
        )
    alone = config.rollout_alone
    if config.rollout.begins_ahead and not alone:
        raise ValueError(
            "'rollout.stream' from staleness 1 on needs a group for 'rollout' alone, since all others work meanwhile: "
            "give 'groups'"
        )
    if config.rollout.in_portions:
        check_portions(config)
    if config.rollout.tensor_parallel > 1 and not alone:
        raise ValueError(
            "'rollout.stream' lets an engine's ranks generate and learn at the same time, and where several make one "
            "engine both would send: give 'rollout' a group of its own, or set 'rollout.tensor_parallel' to 1"
        )
    if config.rollout.sleep and not alone:
        raise ValueError(
            "'rollout.sleep' has no effect with 'rollout.stream', where updates and KV cache are needed at the same "
            "time: remove it"
        )


def check_replay(config: TrainConfig) -> None:
    """Refuse rollouts whose tokens do not bring the experts that they took when they were sampled.

    Raises:
        ValueError: names what does not go together.
    """
    given = [f"rollout.{name}" for name in ("tail", "carry", "stream") if getattr(config.rollout, name) is not None]
    given += ["environment"] * (config.environment is not None)
    given += [f"groups.{name}.elastic" for name, group in config.groups.items() if group.elastic]
    if given:
        raise ValueError(
            f"'actor.routing: replay' does not go with '{given[0]}': experts are recorded of responses that one engine "
            "begins and ends with the same weights; remove one of them"
        )


def check_portions(config: TrainConfig) -> None:
    """Refuse what needs the whole batch before anything is learnt from it, where portions of it are learnt from.

    Raises:
        ValueError: names what does not go together.
    """
    algorithm = config.algorithm
    if not algorithm.on_policy:
        raise ValueError(
            "'rollout.stream' at staleness 0 sums one gradient: 'algorithm.mini_batches' and 'algorithm.epochs' must "
            "be 1"
        )
    if not algorithm.separable:
        advantage, loss = algorithm.functions
        raise ValueError(
            f"'rollout.stream' at staleness 0 learns from a few groups at a time, and advantage '{advantage}', policy "
            f"loss '{loss}' or 'algorithm.correction.normalize' looks at the whole batch: use e.g. algorithm 'grpo' "
            "(with 'ppo' 'algorithm.settings.whiten: false')"
        )
    for name, given in (
        ("algorithm.dynamic_sampling", algorithm.dynamic_sampling is not None),
        ("algorithm.kl.estimator: full", algorithm.full_kl),
        (f"algorithm '{algorithm.name}'", bool({"greedy", "agent"} & algorithm.needs)),
    ):
        if given:
            raise ValueError(f"'rollout.stream' at staleness 0 does not go with {name}: remove one of them")


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
    if config.data.too_long != "drop":
        raise ValueError(
            f"'data.too_long' {config.data.too_long} does not go with 'environment', whose turns follow on whole "
            "prompts: remove it"
        )
    if config.rollout.tensor_parallel > 1:
        raise ValueError(
            "'environment' needs 'rollout.tensor_parallel' 1: the GPUs of one engine must submit the same requests at "
            "the same time, and environments answer when they like"
        )
    if config.rollout.ignore_eos:
        raise ValueError("'rollout.ignore_eos' leaves no end to a turn of an 'environment': remove one of them")
    if config.players:
        check_game(config)


def check_game(config: TrainConfig) -> None:
    """Refuse what takes a prompt to have one conversation for each sample, where a game has several.

    Raises:
        ValueError: names all of it.
    """
    rollout, algorithm, source = config.rollout, config.algorithm, config.reward.kind
    given = [f"rollout.{name}" for name in ("tail", "carry", "stream") if getattr(rollout, name) is not None]
    given += ["algorithm.dynamic_sampling"] * (algorithm.dynamic_sampling is not None)
    given += [f"algorithm '{algorithm.name}'"] * ("greedy" in algorithm.needs)
    given += [f"reward.{source}"] * (source is not None)
    if given:
        raise ValueError(
            f"'environment.agents' does not go with {', '.join(given)}: remove it (a game pays its agents itself)"
        )
