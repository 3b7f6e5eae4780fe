"""Forward passes over finished experience: old and reference log-probs, and the critic's values.

They may run side by side, so each writes its column to a file of its own beside the experience; the advantage task
takes them in. Left out: the passes themselves (penstock/engines/ranks/forward.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.base.ragged import Ragged, offsets_of
from penstock.configs.sections.run import Role
from penstock.engines.commands.forward import Logprobs, TokenValues, Values
from penstock.engines.commands.reference import LogprobsAndKl, ReferenceStates
from penstock.session.session import Training, timed
from penstock.session.settings import Settings
from penstock.state.experience import ExperienceRef, read_columns, write_columns


@dataclass(frozen=True)
class ColumnRef:
    """What a pass left beside the experience, and how long it took: per-token columns, or hidden states."""

    name: str
    path: str
    seconds: float
    columns: tuple[str, ...]


@task(task_run_name="old-logprobs-{settings.iteration:06d}", cache_policy=NO_CACHE)
def old_logprobs(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """Compute the log-probs of the responses under the policy that generated them.

    Where the reward has a KL over the vocabulary this pass computes it as well, after the reference's own pass.
    """
    algorithm = training.config.algorithm
    if not algorithm.full_kl or algorithm.kl_in_loss:
        return _logprobs(training, settings, experience, "actor", "logprobs_old")
    states = _states(training, settings, experience)
    command = LogprobsAndKl(experience.path, settings.temperature, settings.micro_batch_tokens, states.path)
    column = _column(training, experience.key(settings.iteration, "logprobs_old"), "actor", "logprobs_old", command)
    Path(states.path).unlink()
    return column


@task(task_run_name="reference-logprobs-{settings.iteration:06d}", cache_policy=NO_CACHE)
def reference_logprobs(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """Compute the responses' log-probs under the reference, or for a KL over the vocabulary its hidden states."""
    if training.config.algorithm.full_kl:
        return _states(training, settings, experience)
    return _logprobs(training, settings, experience, "reference", "logprobs_reference")


@task(task_run_name="values-{settings.iteration:06d}", cache_policy=NO_CACHE)
def values(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """Compute the critic's value of the state before each response token; with several critics by the row's own."""
    command = Values(experience.path, settings.critic_micro_batch_tokens, tuple(training.config.agents))
    return _column(training, experience.key(settings.iteration, "values"), "critic", "values", command)


def _logprobs(
    training: Training, settings: Settings, experience: ExperienceRef, role: Literal["actor", "reference"], name: str
) -> ColumnRef:
    replayed = role == "actor" and training.config.actor.replays  # a reference has routers of its own
    command = Logprobs(experience.path, role, settings.temperature, settings.micro_batch_tokens, replayed)
    return _column(training, experience.key(settings.iteration, name), role, name, command)


def states_path(experience: ExperienceRef) -> Path:
    """Return where the reference's hidden states lie until they have been used."""
    return Path(experience.path).with_suffix(".reference_states.npy")


def _states(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    path, name = states_path(experience), "logprobs_reference"
    training.session().say("log-probs")
    command = ReferenceStates(experience.path, settings.micro_batch_tokens, str(path))
    with timed(training, {}, name) as span:
        training.session().call("reference", command, experience.key(settings.iteration, name))
    return ColumnRef(name, str(path), span.seconds, columns=())


def _column(
    training: Training, key: str, role: Role, name: str, command: Logprobs | LogprobsAndKl | Values
) -> ColumnRef:
    session = training.session()
    session.say("values" if isinstance(command, Values) else "log-probs")
    path, columns = Path(command.path).with_suffix(f".{name}.parquet"), {}
    with timed(training, {}, name) as span:
        if isinstance(command, LogprobsAndKl):
            both = session.call(role, command, key)
            replies = [TokenValues(reply.rows, reply.values_T) for reply in both]
            columns["kl"] = in_row_order([TokenValues(reply.rows, reply.kl_T) for reply in both], command.path)
        else:
            replies = session.call(role, command, key)
        columns = {name: in_row_order(replies, command.path), **columns}
        write_columns(path, columns)
    return ColumnRef(name, str(path), span.seconds, tuple(columns))


def in_row_order(replies: Sequence[TokenValues], path: str | Path) -> Ragged:
    """Join the values that the ranks computed per response token of the file at `path`, each for rows of its own."""
    return from_ranks(replies, read_columns(path, ["response_tokens"])["response_tokens"].lengths_B)


def from_ranks(replies: Sequence[TokenValues], lengths_B: np.ndarray) -> Ragged:
    """Put together what the ranks computed per response token, each for rows of its own; `lengths_B` of all rows."""
    order = np.concatenate([reply.rows for reply in replies])
    flat = Ragged(np.concatenate([reply.values_T for reply in replies]), offsets_of(lengths_B[order]))
    return flat.take(np.argsort(order))
