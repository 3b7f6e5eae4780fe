"""Sections about the run as a whole: its roles and groups, engines, evaluation, checkpoints and records."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.configs.tree.section import PositiveInt, Section, fill

Role = Literal["actor", "rollout", "critic", "reference", "reward"]

BUILT_IN_EVALUATORS = ("rewards", "diversity", "length", "kl")


def names_of_trackers(tracker: str | list[str]) -> list[str]:
    """Return the names that a `tracker` key holds, the main one first."""
    return [tracker] if isinstance(tracker, str) else tracker


def _each_once(tracker: str | list[str]) -> str | list[str]:
    names = names_of_trackers(tracker)
    if not names:
        raise ValueError("it is empty: name at least one tracker, or leave the key out")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it has '{twice[0]}' twice: remove one")
    return tracker


Trackers = Annotated[str | list[str], AfterValidator(_each_once)]
ABOUT_TRACKERS = (
    "where runs are recorded besides their folder: mlflow, tensorboard, wandb, prometheus, or 'module:Class' of yours; "
    "one, or a list with the main one first"
)


class EvaluateConfig(Section):
    """Responses to held-out prompts, which are never trained on: how often, how many, and what is measured on them."""

    every: int = Field(10, ge=0, description="iterations between evaluations; 0: only before and after")
    prompts: int = Field(0, ge=0, description="held-out prompts used, the first of the file; 0: all")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    samples: PositiveInt = Field(1, description="responses per prompt")
    greedy: bool = Field(
        False, description="a greedy response per prompt as well, unless all are: heldout/greedy_accuracy"
    )
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
    best: str | None = Field(
        None,
        description="figure, e.g. heldout/accuracy: the checkpoint with its highest value is kept as well; "
        "'lowest heldout/kl': that with its lowest",
    )

    @model_validator(mode="after")
    def _keep_something(self) -> Self:
        if not self.every and self.keep != type(self).model_fields["keep"].default:
            raise ValueError("'keep' has no effect where 'every' is 0: remove it")
        if not self.every and self.best:
            raise ValueError("'best' has no effect where 'every' is 0: remove it")
        return self

    @model_validator(mode="after")
    def _best_of_a_figure(self) -> Self:
        if self.best is None:
            return self
        *order, figure = self.best.split() or [""]
        if order in ([], ["highest"], ["lowest"]) and figure not in ("", "highest", "lowest"):
            return self
        raise ValueError(f"'best' is '{self.best}': name a figure, with 'lowest' before it where less is better")


class Devices(Section):
    """What the ranks of one engine group run on."""

    gpus: list[int] | None = Field(
        None,
        description="GPU indices, one rank each; null: all that no other training has (of a pool's machine: all), or "
        "CPU ranks",
    )
    ranks: PositiveInt | None = Field(
        None,
        description="number of ranks in place of 'gpus': on as many GPUs that no other training has, on the CPU where "
        "this machine has none (1), and always on the CPU of other machines",
    )
    pool: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="work pool of Prefect whose machines hold it; null: this machine, or hosts that join by themselves",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="machines, each with these 'gpus' or 'ranks'; 1 with a 'pool'; null without: this machine",
    )

    @model_validator(mode="after")
    def _devices(self) -> Self:
        if self.gpus is not None and self.ranks is not None:
            raise ValueError("'gpus' and 'ranks' exclude each other: 'ranks' takes whichever GPUs are free")
        if self.gpus is not None and (not self.gpus or len(set(self.gpus)) != len(self.gpus)):
            raise ValueError("'gpus' must name at least one GPU, each once")
        if self.pool == "hosts":
            raise ValueError("'pool' cannot be 'hosts', which stands for machines that join by themselves")
        if self.pool is not None:
            fill(self, hosts=1)
        elif self.hosts is not None and self.gpus is None and self.ranks is None:
            raise ValueError(
                "'hosts' without a 'pool' needs 'gpus' or 'ranks': nothing else says what a machine that joins has"
            )
        return self


class GroupConfig(Devices):
    """One engine group: rank processes that hold the models of some roles."""

    roles: list[Role] = Field(min_length=1, description="models this group holds")
    elastic: bool = Field(
        False,
        description="comes and goes while the training runs: nobody waits for its machines, others answer its prompts "
        "when it is lost, and it joins again; for groups of the rollout alone, beside one that stays",
    )

    @model_validator(mode="after")
    def _elastic(self) -> Self:
        if self.elastic and self.roles != ["rollout"]:
            raise ValueError("'elastic' is for groups that hold the rollout alone: remove it, or the other roles")
        return self


class HostsConfig(Section):
    """How the flow and the machines of its groups reach each other, where there are others than the flow's own."""

    address: str = Field(
        "127.0.0.1", description="IPv4 address of the flow's machine on which it listens for its hosts and ranks"
    )
    port: int = Field(0, ge=0, le=65535, description="port on which it listens for its hosts; 0: any that is free")
    interface: str | None = Field(
        None, description="network interface of every host for its ranks, e.g. eth1; null: that of its way to the flow"
    )
    join_timeout_s: float = Field(600.0, gt=0, description="deadline for all hosts to join, seconds")
    silence_s: float = Field(
        30.0, gt=2.0, description="a host silent for longer is lost; one that hears nothing for so long ends its ranks"
    )

    @field_validator("address")
    @classmethod
    def _ipv4(cls, value: str) -> str:
        try:
            address = IPv4Address(value)
        except ValueError:
            raise ValueError(f"'{value}' is no IPv4 address: name one of this machine that the hosts reach") from None
        if address.is_unspecified:
            raise ValueError("'0.0.0.0' would listen on every network: name the one address that the hosts reach")
        return value


class EngineConfig(Section):
    """Deadlines of the engine groups, and how often they may be lost."""

    start_timeout_s: float = Field(600.0, gt=0, description="deadline for starting ranks and loading models, seconds")
    command_timeout_s: float = Field(3600.0, gt=0, description="deadline for one command to a group, seconds")
    heartbeat_timeout_s: float = Field(15.0, gt=0, description="a rank silent for longer counts as lost, seconds")
    restarts: int = Field(
        3, ge=0, description="losses of a rank or host, within 'restart_window_s', after which a training goes on"
    )
    restart_window_s: float = Field(3600.0, gt=0, description="losses longer ago than this count no more, seconds")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if not self.restarts and self.restart_window_s != type(self).model_fields["restart_window_s"].default:
            raise ValueError("'restart_window_s' has no effect where 'restarts' is 0: remove it")
        return self


class RecordConfig(Section):
    """What is recorded where."""

    tracker: Trackers = Field("mlflow", description=ABOUT_TRACKERS)
    experiment: str = Field("penstock", description="the trackers' name for runs that are compared with each other")
    samples_every: int = Field(10, ge=0, description="iterations between tables of samples in the trackers; 0: never")
    samples: PositiveInt = Field(16, description="rows of a table of samples")
    registered_model: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="name in the tracker's registry of models under which the trained model gets a version, by "
        "reference; null: none",
    )

    @model_validator(mode="after")
    def _some_table(self) -> Self:
        if not self.samples_every and self.samples != type(self).model_fields["samples"].default:
            raise ValueError("'samples' has no effect where 'samples_every' is 0: remove it")
        return self
