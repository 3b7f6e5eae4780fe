"""Configurations of what comes before reinforcement learning: preference optimization, and training a reward model.

Trees of their own beside `TrainConfig`, because nothing of rollout, reward and iterations applies to them. What they
share with it (model, trainer, devices, deadlines) is the same sections.

Left out: reading recipes (penstock/configs/loading/load.py), checks that need files (penstock/checks/preferences.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.algorithms.declarations.settings import settings
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.registry import every_preference_setting, is_labelled, needs_reference, preference_loss_named
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.data import DataConfig, check_chat_arguments
from penstock.configs.sections.function_settings import FunctionSettings, own_function
from penstock.configs.sections.model import ModelConfig
from penstock.configs.sections.run import ABOUT_TRACKERS, Devices, EngineConfig, GroupConfig, HostsConfig, Trackers
from penstock.configs.sections.trainer import SftConfig
from penstock.configs.tree.annotations import Knows
from penstock.configs.tree.section import PositiveInt, Recipe, Section, fill, refuse

if TYPE_CHECKING:
    LossName = str
else:  # the registry knows the names, so that a file is all that a new loss takes
    LossName = Literal[tuple(PREFERENCE_LOSSES)] | Annotated[str, AfterValidator(own_function)]

SETTINGS = FunctionSettings("PreferenceLossSettings", every_preference_setting(), scheduled=False)
LABELLED = ", ".join(filter(is_labelled, PREFERENCE_LOSSES))


class PreferenceLossConfig(Section):
    """Which preference loss, and its settings."""

    name: LossName = Field(
        "dpo",
        description=f"loss, or a function of yours as 'module:function'; {LABELLED} takes labelled rows, else pairs",
    )
    settings: Annotated[dict[str, Any], Knows(SETTINGS.known)] = Field(
        default_factory=dict, description="settings of the loss, yours too"
    )

    @field_validator("settings")
    @classmethod
    def _in_force(cls, given: dict[str, Any], before: ValidationInfo) -> dict[str, Any]:
        if "name" not in before.data:  # it is wrong, and is reported
            return given
        name = before.data["name"]
        return SETTINGS.checked(given, settings(preference_loss_named(name)), f"loss '{name}'")

    @property
    def labelled(self) -> bool:
        """Whether it takes rows with a label instead of pairs."""
        return is_labelled(self.name)

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the model that training starts from."""
        return needs_reference(self.name)


class PairTrainerConfig(SftConfig):
    """How DeepSpeed trains on preferences."""

    batch: PositiveInt = Field(64, description=f"pairs ({LABELLED}: rows) of one optimizer step")
    max_tokens: PositiveInt = Field(
        1024, description=f"pairs ({LABELLED}: rows) of which a prompt with its response is longer are dropped, tokens"
    )


class PairData(Section):
    """Where pairs come from: JSONL or Parquet, a row per pair."""

    train: str | None = Field(None, description="JSONL or Parquet file to train on")
    heldout: str | None = Field(None, description="the same kind of file, for the figures after training; null: none")
    prompt: str = Field("prompt", description="column with the prompt: text, or a list of {role, content} messages")
    chosen: str | None = Field(None, description="column with the preferred response, text (chosen)")
    rejected: str | None = Field(None, description="column with the other response, text (rejected)")
    chat: bool = Field(False, description="wrap a text prompt as one user message in the tokenizer's chat template")
    template: str | None = Field(None, description="text around a text prompt, with {prompt} where the column goes")
    chat_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the chat template, e.g. {enable_thinking: false} for Qwen3; in training and "
        "evaluation alike",
    )
    shuffle: bool = Field(True, description="a new deterministic order in every epoch; false: file order")

    @model_validator(mode="after")
    def _place_of_the_prompt(self) -> Self:
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError("'template' must contain {prompt}, the place where the prompt column goes")
        check_chat_arguments(self.chat_arguments)
        return self

    @property
    def prompts(self) -> DataConfig:
        """How a row becomes a prompt."""
        return DataConfig(
            prompt=self.prompt, chat=self.chat, template=self.template, chat_arguments=self.chat_arguments
        )


class PreferenceData(PairData):
    """Where preferences come from: a row per pair, or per response with a label."""

    response: str | None = Field(None, description=f"column with a response, text ({LABELLED} only; response)")
    label: str | None = Field(
        None, description=f"column that says whether it is good, true or false ({LABELLED} only; label)"
    )


class RewardModelData(PairData):
    """Where a reward model's pairs come from."""

    margin: str | None = Field(
        None, description="column with the number by which the scores should differ at least; null: 0 for all"
    )

    @model_validator(mode="after")
    def _columns(self) -> Self:
        fill(self, chosen="chosen", rejected="rejected")
        return self


class PairConfig(Recipe):
    """What both trees hold."""

    name: str = Field(
        "preference", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run, part of its folder"
    )
    folder: str = Field("runs", description="directory that receives run folders")
    seed: int = Field(0, ge=0, description="seed of everything random")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model to start from")
    trainer: PairTrainerConfig = Field(default_factory=PairTrainerConfig, description="training")
    devices: Devices = Field(default_factory=Devices, description="where it runs")
    hosts: HostsConfig | None = Field(None, description="the network between machines; null: there is one machine")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="deadlines of the ranks")
    tracker: Trackers = Field("mlflow", description=ABOUT_TRACKERS)
    experiment: str = Field("penstock", description="the trackers' name for runs that are compared with each other")
    data: PairData = Field(default_factory=PairData, description="pairs or labelled rows")

    @model_validator(mode="after")
    def _network(self) -> Self:
        if self.model.tiny is not None and self.model.tiny.encoder is not None:
            raise ValueError("'model.tiny.encoder': rows of preferences have no images: remove it")
        if self.model.train_encoder:
            raise ValueError("'model.train_encoder': rows of preferences have no images: remove it")
        if self.devices.hosts:
            fill(self, hosts=HostsConfig())
        elif self.hosts is not None:
            raise ValueError("'hosts' has no effect where 'devices' has neither 'pool' nor 'hosts': remove it")
        return self

    @property
    def rows_together(self) -> int:
        """Rows that no micro-batch cuts apart: a pair's two."""
        return 2

    def engines(self) -> TrainConfig:
        """Return what placing, starting and measuring of engines look at, as the tree that they know."""
        longest = self.rows_together * self.trainer.max_tokens
        group = GroupConfig(**self.devices.model_dump(), roles=["actor", "rollout"])
        return TrainConfig(
            name=self.name,
            folder=self.folder,
            seed=self.seed,
            model=self.model,
            sft=SftConfig(**self.trainer.model_dump() | {"max_tokens": longest}),
            groups={"main": group},
            hosts=self.hosts,
            engine=self.engine,
        )


class PreferenceConfig(PairConfig):
    """Preference optimization of a policy: DPO and its relatives."""

    data: PreferenceData = Field(default_factory=PreferenceData, description="preferences")
    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig, description="loss and its settings")

    @model_validator(mode="after")
    def _columns(self) -> Self:
        pairs, rows = ("chosen", "rejected"), ("response", "label")
        own, others = (rows, pairs) if self.loss.labelled else (pairs, rows)
        refuse(self.data, others, f"with loss '{self.loss.name}'")
        fill(self.data, **{name: name for name in own})
        return self

    @property
    def rows_together(self) -> int:
        """Rows that no micro-batch cuts apart."""
        return 1 if self.loss.labelled else 2


class RewardModelConfig(PairConfig):
    """Training of a reward model on pairs."""

    name: str = Field(
        "reward-model", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run, part of its folder"
    )
    data: RewardModelData = Field(default_factory=RewardModelData, description="pairs")

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.trainer.lora is not None and self.trainer.lora.experts:
            raise ValueError(
                "'trainer.lora.experts' is for policies: adapters beside a reward model's experts have not been "
                "compared; remove it"
            )
        return self
