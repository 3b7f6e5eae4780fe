"""The whole configuration of a training as one pydantic tree; it is also the `train` flow's parameter.

Why one tree: the Prefect UI draws its form from it, `--dry-run` prints it resolved, the run folder keeps it,
MLflow records it, and a key that is unknown or that would change nothing is refused before any engine starts.

Optional settings default to None where their meaning depends on another key (a GAE lambda without a critic);
validation fills them in where they apply and refuses them where they do not. So a resolved tree shows exactly
what is in force, and resolving it a second time changes nothing.

Left out: reading files and composing recipes (configs/loading.py), checks that need the machine or the data
(tasks/check.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from configs.agents import AgentsConfig, check_agents
from configs.algorithm import ONE_STEP, AlgorithmConfig
from configs.bounds import LARGEST_REWARD
from configs.environment import EnvironmentConfig, check_environment
from configs.lora import LoraConfig
from configs.reward_servers import JudgeConfig, ServiceConfig
from configs.sampling import SamplerConfig, without_shuffle
from configs.schedule import Scheduled, ScheduledAboveZero
from configs.section import PositiveInt, Recipe, Section, Share, fill

Role = Literal["actor", "rollout", "critic", "reference", "reward"]


# ---- the model -----------------------------------------------------------------------------------------------------


class TinyModel(Section):
    """A random Qwen3-shaped model with a byte tokenizer, made in the run folder: for the quickstart and for tests."""

    hidden_size: PositiveInt = Field(
        96, description="width of the residual stream; a multiple of 32 x heads is fastest"
    )
    layers: PositiveInt = Field(3, description="transformer blocks")
    heads: PositiveInt = Field(3, description="query heads; hidden_size must be a multiple of it")
    kv_heads: PositiveInt = Field(3, description="key/value heads; heads must be a multiple of it")
    intermediate_size: PositiveInt = Field(256, description="width of the MLP")
    max_positions: PositiveInt = Field(256, description="longest sequence, tokens")
    tie_embeddings: bool = Field(True, description="one matrix for the input and the output embedding")

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("hidden_size must be a multiple of heads, and heads a multiple of kv_heads")
        return self


class ModelConfig(Section):
    """Which causal language model the actor starts from."""

    path: str | None = Field(
        None, description="Hugging Face model folder on this machine (config, safetensors, tokenizer)"
    )
    tiny: TinyModel | None = Field(None, description="make a tiny random model instead of loading one")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="dtype of the weights in training and rollout; auto: bfloat16 on GPU, float32 on CPU"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.tiny is not None:
            raise ValueError("'path' and 'tiny' exclude each other: remove one")
        return self


# ---- data ----------------------------------------------------------------------------------------------------------


class ArithmeticData(Section):
    """Addition problems `12+34=` with the answer `046.`, made from the seed: no file is needed."""

    digits: int = Field(2, ge=1, le=4, description="digits of each summand")
    sft: PositiveInt = Field(4000, description="problems for the supervised warm-up")
    mistakes: Share = Field(0.0, description="share of the warm-up's answers with one wrong digit: a careless teacher")
    calls: Share = Field(
        0.0, description="share of the warm-up's answers before which the teacher asks environments.calculator"
    )
    train: PositiveInt = Field(4000, description="problems for reinforcement learning")
    heldout: PositiveInt = Field(1000, description="problems kept apart for evaluation")

    @model_validator(mode="after")
    def _teacher(self) -> Self:
        if self.calls and self.mistakes:
            raise ValueError("'mistakes' has no effect with 'calls', where the calculator answers: remove one")
        return self


def check_chat_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template that are not the user's to choose.

    Raises:
        ValueError: one is.
    """
    for name in ("conversation", "tokenize", "add_generation_prompt"):
        if name in arguments:
            raise ValueError(f"'chat_arguments' has '{name}', which is set for every prompt: remove it")


class DataConfig(Section):
    """Where prompts come from and how a row becomes one."""

    train: str | None = Field(None, description="JSONL or Parquet file of training prompts")
    heldout: str | None = Field(None, description="JSONL or Parquet file of held-out prompts, for evaluation only")
    sft: str | None = Field(
        None, description="JSONL or Parquet file of prompts and responses for the supervised warm-up"
    )
    arithmetic: ArithmeticData | None = Field(None, description="make addition problems instead of reading files")
    prompt: str = Field("prompt", description="column with the prompt: text, or a list of {role, content} messages")
    response: str | None = Field(None, description="column with the response to imitate (supervised warm-up only)")
    agents: AgentsConfig | None = Field(None, description="which agent a row is for (ippo)")
    chat: bool = Field(False, description="wrap a text prompt as one user message in the tokenizer's chat template")
    template: str | None = Field(None, description="text around a text prompt, with {prompt} where the column goes")
    chat_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the chat template, e.g. {enable_thinking: false} for Qwen3; in training and "
        "evaluation alike",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="longer prompts are dropped and counted, tokens")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="which prompts an iteration takes")

    @model_validator(mode="before")
    @classmethod
    def _shuffle(cls, values: Any) -> Any:
        return without_shuffle(values)

    @model_validator(mode="after")
    def _sources(self) -> Self:
        if self.arithmetic is not None and (self.train or self.heldout or self.sft):
            raise ValueError("'arithmetic' makes its own problems: remove 'train', 'heldout' and 'sft'")
        if self.arithmetic is not None and (self.prompt != "prompt" or self.response not in (None, "response")):
            raise ValueError("'arithmetic' has columns of its own names: remove 'prompt' and 'response'")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError("'template' must contain {prompt}, the place where the prompt column goes")
        check_chat_arguments(self.chat_arguments)
        return self


# ---- reward --------------------------------------------------------------------------------------------------------


class OverlongConfig(Section):
    """The soft punishment of responses that come near `rollout.max_response_tokens` (DAPO); training alone."""

    buffer_tokens: PositiveInt = Field(description="the penalty grows over the last tokens before the limit, tokens")
    penalty: float = Field(1.0, gt=0, le=LARGEST_REWARD, description="what a response of full length loses")


class RewardConfig(Section):
    """What a response is worth: a Python function, a reward model in this training, or a server that others share."""

    function: str | None = Field(
        None, description="'module:function'; built in: rewards.builtin:exact_match, :last_number, :matches_regex"
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments for the function")
    model: str | None = Field(None, description="Hugging Face sequence-classification folder that scores responses")
    judge: JudgeConfig | None = Field(None, description="a language model behind a server that judges responses")
    service: ServiceConfig | None = Field(None, description="a reward model behind a server that scores responses")
    timeout_s: float = Field(10.0, gt=0, description="deadline for one call of the function, seconds")
    workers: int | None = Field(
        None, ge=1, le=64, description="processes that run the function or read a judge; null: one per 2 cores, 2 to 32"
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
        given = [f"'{name}'" for name in REWARD_SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: keep one")
        if self.function is None and self.settings:
            raise ValueError("'settings' has no effect without 'function': remove it")
        for name in ("timeout_s", "workers") if self.model or self.service else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"'{name}' has no effect with {given[0]}: remove it")
        return self

    @property
    def given(self) -> bool:
        """Whether there is a source of rewards here; with an environment there need not be."""
        return any(getattr(self, name) is not None for name in REWARD_SOURCES)

    @property
    def source(self) -> str:
        """What gives the rewards, for messages."""
        name = next((name for name in REWARD_SOURCES if getattr(self, name) is not None), None)
        if name is None:
            return "reward"
        value = getattr(self, name)
        return f"reward.{name} '{value if isinstance(value, str) else value.model}'"


REWARD_SOURCES = ("function", "model", "judge", "service")


# ---- rollout -------------------------------------------------------------------------------------------------------


class RolloutConfig(Section):
    """How experience is generated with vLLM."""

    prompts: PositiveInt = Field(64, description="prompts of one iteration")
    samples: PositiveInt = Field(8, description="responses per prompt")
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


# ---- training ------------------------------------------------------------------------------------------------------


class OptimizerConfig(Section):
    """AdamW and its learning rate. lr(step) = learning_rate x warm-up x decay."""

    learning_rate: Scheduled[float] = Field(1e-6, description="peak learning rate; may follow a schedule by iteration")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    min_ratio: float = Field(0.0, ge=0, le=1, description="the decay ends at this share of learning_rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decay rates")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")

    @model_validator(mode="after")
    def _decay(self) -> Self:
        if self.decay == "constant" and self.min_ratio:
            raise ValueError("'min_ratio' has no effect with decay 'constant': remove it")
        return self


class TrainerConfig(Section):
    """How DeepSpeed trains one model."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="DeepSpeed ZeRO stage: what is sharded over the ranks; 0: nothing, only for float32 weights; "
        "1: the optimizer's state, gradients are reduced once per step; 2: gradients too, reduced with every "
        "micro-batch; 3: weights too",
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="recompute activations in the backward pass, slower with less memory; null: only where the memory "
        "estimate does not fit otherwise",
    )
    micro_batch_tokens: ScheduledAboveZero[int] = Field(
        16384, description="prompt + response tokens of one forward pass on one rank"
    )
    offload_optimizer: bool = Field(
        False,
        description="keep AdamW's state and the float32 masters in host memory between updates, for a larger KV cache "
        "in the rollout; ZeRO stage 2 only, no effect on CPU",
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters and leave the weights as they are; null: train all weights"
    )

    @model_validator(mode="after")
    def _lora(self) -> Self:
        if self.lora is not None and self.zero_stage == 3:
            raise ValueError(
                "'lora' needs 'zero_stage' 0, 1 or 2: 3 shards the weights that are trained, and adapters are small"
            )
        return self

    @model_validator(mode="after")
    def _offload(self) -> Self:
        if self.offload_optimizer and self.zero_stage != 2:
            raise ValueError(
                f"'offload_optimizer' needs 'zero_stage' 2, not {self.zero_stage}: {OFFLOAD_REFUSED[self.zero_stage]}"
            )
        return self


OFFLOAD_REFUSED = {
    0: "without ZeRO there is nothing that DeepSpeed could move",
    1: "in bfloat16 DeepSpeed's optimizer of stage 1 cannot move its state, and stage 2 shards more",
    3: "there DeepSpeed moves the state of an Adam of its own only, which has to be compiled on the machine",
}


class ActorConfig(TrainerConfig):
    """The policy that is trained."""


class CriticConfig(TrainerConfig):
    """The value model (PPO). It starts from the actor's weights with a new scalar head."""

    path: str | None = Field(None, description="Hugging Face folder to start from; default: the actor's starting point")
    value_clip: float | None = Field(0.2, gt=0, description="clip range of the value loss; null: no clipping")


class SftConfig(TrainerConfig):
    """Supervised training on prompt/response pairs: the `sft` flow, also the warm-up of `train`."""

    steps: PositiveInt = Field(400, description="optimizer steps")
    batch: PositiveInt = Field(128, description="rows of one optimizer step")
    max_tokens: PositiveInt = Field(1024, description="longer rows are dropped and counted, tokens")
    checkpoint_every: int = Field(
        100, ge=0, description="optimizer steps between checkpoints, of which the newest is kept until the end; 0: none"
    )

    @model_validator(mode="after")
    def _alone(self) -> Self:
        if self.offload_optimizer:
            raise ValueError("'offload_optimizer' has no effect here (nothing else needs the memory): remove it")
        return self


# ---- the rest of a run ---------------------------------------------------------------------------------------------


BUILT_IN_EVALUATORS = ("rewards", "diversity", "length", "kl")


class EvaluateConfig(Section):
    """Responses to held-out prompts, which are never trained on: how often, how many, and what is measured on them."""

    every: int = Field(10, ge=0, description="iterations between evaluations; 0: only before and after")
    prompts: int = Field(0, ge=0, description="held-out prompts used, the first of the file; 0: all")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    samples: PositiveInt = Field(1, description="responses per prompt")
    evaluators: list[str] | None = Field(
        None,
        description="what is measured beside accuracy and mean reward: rewards, diversity, length, kl (to the "
        "reference), 'module:Class'; null: all built-in ones, kl where there is a reference",
    )

    @model_validator(mode="after")
    def _samples(self) -> Self:
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"'samples' ({self.samples}) has no effect with 'temperature' 0: greedy responses to a prompt are all "
                "the same; set a temperature, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _evaluators(self) -> Self:
        evaluators = self.evaluators or []
        for name in evaluators:
            if name not in BUILT_IN_EVALUATORS and ":" not in name:
                built_in = ", ".join(BUILT_IN_EVALUATORS)
                raise ValueError(f"'evaluators' has '{name}': name one of {built_in}, or a class as 'module:Class'")
        if twice := sorted({name for name in evaluators if evaluators.count(name) > 1}):
            raise ValueError(f"'evaluators' has '{twice[0]}' twice: remove one")
        return self


class CheckpointConfig(Section):
    """When the run's state is made durable."""

    every: int = Field(
        10, ge=0, description="iterations between checkpoints; the last gets one, too. 0: none, a resume begins anew"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept; older ones are deleted")

    @model_validator(mode="after")
    def _keep_something(self) -> Self:
        if not self.every and self.keep != type(self).model_fields["keep"].default:
            raise ValueError("'keep' has no effect where 'every' is 0: remove it")
        return self


class Devices(Section):
    """What the ranks of one engine group run on."""

    gpus: list[int] | None = Field(None, description="GPU indices, one rank each; null: all visible GPUs, or CPU ranks")
    ranks: PositiveInt | None = Field(None, description="number of CPU ranks on a machine without a GPU (1)")

    @model_validator(mode="after")
    def _devices(self) -> Self:
        if self.gpus is not None and self.ranks is not None:
            raise ValueError("'gpus' and 'ranks' exclude each other: 'ranks' is for machines without a GPU")
        if self.gpus is not None and (not self.gpus or len(set(self.gpus)) != len(self.gpus)):
            raise ValueError("'gpus' must name at least one GPU, each once")
        return self


class GroupConfig(Devices):
    """One engine group: rank processes that hold the models of some roles."""

    roles: list[Role] = Field(min_length=1, description="models this group holds")


class EngineConfig(Section):
    """Deadlines of the engine groups."""

    start_timeout_s: float = Field(600.0, gt=0, description="deadline for starting ranks and loading models, seconds")
    command_timeout_s: float = Field(3600.0, gt=0, description="deadline for one command to a group, seconds")
    heartbeat_timeout_s: float = Field(15.0, gt=0, description="a rank silent for longer counts as lost, seconds")


class RecordConfig(Section):
    """What is recorded where."""

    experiment: str = Field("penstock", description="MLflow experiment")
    samples_every: int = Field(10, ge=0, description="iterations between tables of samples in MLflow; 0: never")
    samples: PositiveInt = Field(16, description="rows of a table of samples")

    @model_validator(mode="after")
    def _some_table(self) -> Self:
        if not self.samples_every and self.samples != type(self).model_fields["samples"].default:
            raise ValueError("'samples' has no effect where 'samples_every' is 0: remove it")
        return self


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
    actor: ActorConfig = Field(default_factory=ActorConfig, description="training of the policy")
    critic: CriticConfig | None = Field(None, description="training of the value model (ppo only)")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="durable state")
    groups: dict[str, GroupConfig] = Field(
        default_factory=dict, description="placement; empty: one group for all roles"
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="deadlines of the engine groups")
    record: RecordConfig = Field(default_factory=RecordConfig, description="MLflow and samples")

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.algorithm.needs_critic:
            fill(self, critic=CriticConfig(optimizer=self.actor.optimizer))
        elif self.critic is not None:
            raise ValueError(f"'critic' has no effect with algorithm '{self.algorithm.name}': remove it")
        usual = (None, CriticConfig.model_fields["value_clip"].default)
        if self.critic is not None and self.algorithm.on_policy and self.critic.value_clip not in usual:
            raise ValueError(f"'critic.value_clip' has no effect {ONE_STEP}: remove it, or take more steps")
        check_agents(self.data.agents, "agent" in self.algorithm.needs, self.algorithm.name)
        if "group" in self.algorithm.needs and self.rollout.samples < 2:
            raise ValueError(
                f"'rollout.samples' must be at least 2 with algorithm '{self.algorithm.name}': "
                "it compares samples of a prompt"
            )
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
        if self.rollout.prompts % self.algorithm.mini_batches:
            raise ValueError(
                f"'rollout.prompts' ({self.rollout.prompts}) must be a multiple of "
                f"'algorithm.mini_batches' ({self.algorithm.mini_batches})"
            )
        if self.sft is None and (self.data.sft or self.data.response):
            raise ValueError("'data.sft' and 'data.response' have no effect without an 'sft' section: remove them")
        for name in ("failure_value", "max_failure_share") if self.reward.model and self.environment is None else ():
            if getattr(self.reward, name) != RewardConfig.model_fields[name].default:
                raise ValueError(f"'reward.{name}' has no effect with 'reward.model': remove it")
        self._check_reference()
        check_environment(self)
        self._check_placement()
        return self

    def _check_reference(self) -> None:
        kl = self.algorithm.kl
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
        if not self.groups:
            return
        held = [role for group in self.groups.values() for role in group.roles]
        needed = self.roles
        if twice := sorted({role for role in held if held.count(role) > 1}):
            raise ValueError(f"'groups' places {', '.join(twice)} twice: one group must hold it")
        if missing := sorted(set(needed) - set(held)):
            raise ValueError(f"'groups' places no {', '.join(missing)}: add it to a group's roles")
        if idle := sorted(set(held) - set(needed)):
            raise ValueError(
                f"'groups' places {', '.join(idle)}, which this algorithm and reward do not use: remove it"
            )
        indices = [index for group in self.groups.values() for index in group.gpus or []]
        if len(set(indices)) != len(indices):
            raise ValueError("'groups' gives a GPU to two groups: each GPU belongs to one")
        trained = {"actor": self.actor, "critic": self.critic}
        for (role,) in (group.roles for group in self.groups.values() if len(group.roles) == 1):
            if (trainer := trained.get(role)) is not None and trainer.offload_optimizer:
                raise ValueError(f"'{role}.offload_optimizer' has no effect: nothing else is in its group; remove it")

    @property
    def agents(self) -> list[str]:
        """Agents that have a critic each; none where there is one critic, or no critic."""
        return self.data.agents.names if self.data.agents is not None else []

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
    def old_logprobs_needed(self) -> bool:
        """Whether log-probs of the generating policy are needed: off-policy steps, KL in the reward, the algorithm."""
        return self.algorithm.old_logprobs_needed
