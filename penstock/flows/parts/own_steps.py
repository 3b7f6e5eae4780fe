"""The steps of an iteration in an order of the user's own: what `dataflow` names is called with them.

    def iteration(step):
        step.rollout()
        step.reward()
        step.add_reward("short", "my_rewards:short", weight=0.1)
        step.advantage()
        step.update()

Each step is the task of the usual dataflow, with its guards, on the one batch that an iteration has. What is not for a
user to leave out comes after it, in penstock/flows/iteration.py: reshard, comparison, evaluation, record, checkpoint.
So a run of an own dataflow resumes, recovers and is looked at as any other. Left out: several batches in an iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.checks.dataflow import load_dataflow
from penstock.flows.parts.learning import learnt
from penstock.flows.parts.passes import PASSES, forward_passes, needed
from penstock.flows.parts.rewards import rewarded
from penstock.session.logged import log
from penstock.session.requests import Rollout
from penstock.session.rollout.refused_groups import PART
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings, live_figures
from penstock.state.experience import column_names, drop_experience, read_columns
from penstock.state.manifest import Progress
from penstock.tasks.dataflow.add_reward import add_reward, score
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.forward_passes import ColumnRef
from penstock.tasks.iteration.rollout import rollout

if TYPE_CHECKING:
    import numpy as np

    from penstock.configs.schema import TrainConfig


class Iteration:
    """An iteration that a dataflow of the user's own goes through, step by step, each of them once.

    Attributes:
        number: of the iteration, from 1 on.
        config: the configuration of the training.
        settings: the values in force in this iteration: schedules and live overrides are resolved.
    """

    def __init__(self, training: Training, settings: Settings, progress: Progress, begun: Rollout) -> None:
        self.number = settings.iteration
        self.config: TrainConfig = training.config
        self.settings = settings
        self._training, self._progress, self._begun = training, progress, begun
        self._stage: Stage | None = None
        self._passes: dict[str, ColumnRef] = {}
        self._figures: dict[str, float] | None = None  # once something was learnt
        self._done: list[str] = []

    def rollout(self) -> None:
        """Have the policy answer the prompts of the iteration; the engines may have begun before."""
        self._begin("rollout")
        self._stage = rollout(self._training, self.settings, self._begun)

    def reward(self) -> None:
        """Score the responses as the recipe says: its reward, dynamic sampling, the greedy baseline of ReMax."""
        self._begin("reward", after="rollout", before="advantage")
        self._stage = rewarded(self._training, self.settings, self._progress, self._batch)

    def add_reward(
        self,
        name: str,
        scores: str | Sequence[float] | np.ndarray,
        weight: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a part to the reward: `reward/<name>`, which counts `weight` times.

        Args:
            scores: a function as `module:function`, which gets what `reward.function` gets and runs as that does; or a
                number for each response, in the order of `read`.
            settings: of the function.

        Raises:
            UserError: there is a part of that name, the function does not load or fails, or the numbers are wrong.
        """
        self._begin(f"add_reward('{name}')", after="reward", before="advantage")
        stage, given = self._batch, None
        if not name.isidentifier():
            raise UserError(f"a part of the reward cannot be called {name!r}", "of letters, digits and _, as 'short'")
        if PART + name in column_names(stage.experience.path):
            raise UserError(f"the reward has a part '{name}' already", "call the one that is added otherwise")
        if isinstance(scores, str):
            stage = score(self._training, self.settings, stage, name, scores, dict(settings or {}))
        elif settings is not None:
            raise UserError(
                f"the scores of '{name}' are numbers and take no settings", "give a function as 'module:function'"
            )
        else:
            given = scores
        self._stage = add_reward(stage, name, weight, given)

    def read(self, *names: str) -> dict[str, Any]:
        """Return columns of the batch, a row for each response; without names all that there are.

        Texts are lists, numbers arrays, and of what each token has a number `Ragged`: `values_T` and `offsets_B1`.

        Raises:
            UserError: there is no column of a name.
        """
        self._look("read", after="rollout")
        path = self._batch.experience.path
        there = column_names(path)
        if unknown := [name for name in names if name not in there]:
            raise UserError(f"the batch has no column '{unknown[0]}' yet", f"it has: {', '.join(sorted(there))}")
        return read_columns(path, names or there)

    def logprobs(self, role: Literal["actor", "reference"] = "actor") -> Ragged:
        """Return the log-probs of the response tokens under the policy as it is, or under the reference.

        Raises:
            UserError: there is no such role, or the policy was updated already.
        """
        name = {"actor": "logprobs_old", "reference": "logprobs_reference"}.get(role)
        if name is None or role not in self.config.roles:
            had = ", ".join(known for known in ("actor", "reference") if known in self.config.roles)
            raise UserError(f"the training has no '{role}' that gives log-probs", f"it has: {had}")
        if self.config.algorithm.full_kl:
            raise UserError("a KL over the vocabulary leaves no log-probs", "set algorithm.kl.estimator to another one")
        rows_stay_after = "rollout" if self.config.algorithm.dynamic_sampling is None else "reward"
        self._look(f"logprobs('{role}')", after=rows_stay_after, before="advantage")
        if name not in self._passes:
            self._passes[name] = PASSES[name](self._training, self.settings, self._batch.experience)
        found: Ragged = read_columns(self._passes[name].path, [name])[name]
        return found

    def advantage(self) -> None:
        """Compute advantages, and before them the forward passes that the algorithm needs."""
        self._begin("advantage", after="reward")
        passes = [part for name, part in self._passes.items() if needed(self.config, name)]
        passes += forward_passes(self._training, self.settings, self._batch, self._passes)
        self._stage = advantage(self._training, self.settings, self._batch, passes)

    def update(self) -> None:
        """Update the actor, and the critic if there is one, in the mini-batches and epochs of the recipe."""
        self._begin("update", after="advantage")
        self._figures = learnt(self._training, self.settings, self._progress, self._batch)

    def log(self, name: str, value: float) -> None:
        """Record a figure with this iteration (`penstock.log`)."""
        log(name, value)

    def end(self) -> tuple[Stage, dict[str, float]]:
        """Return the batch and the figures of the iteration; called by the training once the steps are done.

        Raises:
            UserError: there was no rollout.
        """
        if self._stage is None:
            raise self._out_of_turn("it has ended without step.rollout()")
        for part in self._passes.values():  # those that the algorithm needs are in the experience
            drop_experience(Path(part.path))
        if self._figures is None:  # nothing is learnt from this batch
            return self._stage, self._stage.metrics | live_figures(self._training, self._progress)
        return self._stage, self._figures

    @property
    def _batch(self) -> Stage:
        assert self._stage is not None  # a step that comes after the rollout has looked
        return self._stage

    def _begin(self, step: str, after: str = "", before: str = "") -> None:
        """Look whether it is a step's turn, and note that it has been."""
        if step in self._done:
            raise self._out_of_turn(f"step.{step} was there already: an iteration has each step once")
        self._look(step, after, before)
        self._done.append(step)

    def _look(self, step: str, after: str = "", before: str = "") -> None:
        if after and after not in self._done:
            raise self._out_of_turn(f"step.{step} comes after step.{after}")
        if before and before in self._done:
            raise self._out_of_turn(f"step.{step} comes before step.{before}")

    def _out_of_turn(self, says: str) -> UserError:
        where = f"dataflow '{self.config.dataflow}', iteration {self.number}"
        return UserError(f"{where}: {says}", f"what was done so far: {', '.join(self._done) or 'nothing'}")


def own_steps(
    training: Training, settings: Settings, progress: Progress, begun: Rollout
) -> tuple[Stage, dict[str, float]]:
    """Go through an iteration as the user's dataflow does; return its batch and its figures so far."""
    step = Iteration(training, settings, progress, begun)
    load_dataflow(training.config)(step)
    return step.end()
