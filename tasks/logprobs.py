"""Forward passes over finished experience: old and reference log-probs, and the critic's values.

They may run side by side, so each writes its column to a file of its own beside the experience; the advantage task
takes them in. Left out: the passes themselves (engines/worker.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.schema import Role
from state.experience import ExperienceRef, Ragged, offsets_of, read_columns, write_columns
from tasks.session import Training
from tasks.settings import Settings


@dataclass(frozen=True)
class ColumnRef:
    """One per-token column in a file of its own, and how long it took."""

    name: str
    path: str
    seconds: float


@task(task_run_name="old-logprobs-{settings.iteration:06d}", cache_policy=NO_CACHE)
def old_logprobs(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """Log-probs of the responses under the policy that generated them."""
    return _logprobs(training, settings, experience, "actor", "logprobs_old")


@task(task_run_name="reference-logprobs-{settings.iteration:06d}", cache_policy=NO_CACHE)
def reference_logprobs(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """Log-probs of the responses under the reference policy."""
    return _logprobs(training, settings, experience, "reference", "logprobs_reference")


@task(task_run_name="values-{settings.iteration:06d}", cache_policy=NO_CACHE)
def values(training: Training, settings: Settings, experience: ExperienceRef) -> ColumnRef:
    """The critic's values of the state before each response token."""
    budget = settings.critic_micro_batch_tokens
    return _column(training, settings, experience, "critic", "values", "values", {"budget": budget})


def _logprobs(training: Training, settings: Settings, experience: ExperienceRef, role: Role, name: str) -> ColumnRef:
    arguments = {"role": role, "temperature": settings.temperature, "budget": settings.micro_batch_tokens}
    return _column(training, settings, experience, role, name, "logprobs", arguments)


def _column(
    training: Training,
    settings: Settings,
    experience: ExperienceRef,
    role: Role,
    name: str,
    command: str,
    arguments: dict[str, Any],
) -> ColumnRef:
    begin = time.perf_counter()
    replies = training.session().call(role, command, f"{settings.iteration}/{name}", path=experience.path, **arguments)
    lengths_B = read_columns(experience.path, ["response_tokens"])["response_tokens"].lengths_B
    order = np.concatenate([reply["rows"] for reply in replies])
    flat = Ragged(np.concatenate([reply["values"] for reply in replies]), offsets_of(lengths_B[order]))
    path = Path(experience.path).with_suffix(f".{name}.parquet")
    write_columns(path, {name: flat.take(np.argsort(order))})
    return ColumnRef(name, str(path), time.perf_counter() - begin)
