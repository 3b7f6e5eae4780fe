"""What a replay starts from: the tasks that an iteration had, their inputs, and the state before the iteration.

A task is a function of the columns that were in the experience before it, of the values in force, and of the models
before the iteration. A checkpoint holds those models, or an earlier one does: then the updates between are done again
from their experience, which holds all that an update reads. The values in force are those of the configuration, of the
checkpoint's manifest and of the recorded figures. All of a run folder is read, and nothing of it is written.

Left out: running the tasks (penstock/flows/replay.py), and what is compared (penstock/tasks/replay/differences.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import visible_gpus
from penstock.reports.faults import UNDONE
from penstock.session.session import Stage, Training, read_config
from penstock.session.settings import live_overrides_in, next_kl_coefficient, next_settings
from penstock.state.experience import column_names, damaged, origin_of, read_columns, write_columns
from penstock.state.manifest import Progress, check_kind, read_manifest, verify_checkpoint
from penstock.state.mending import checkpoints
from penstock.state.run_folder import RunFolder, open_run_folder, read_metrics
from penstock.tasks.iteration.greedy_baseline import GREEDY_REWARD
from penstock.tasks.iteration.rollout import DESCRIBING, describe, waiting_after
from penstock.tasks.stream.portion import PORTIONS

PASSES = ("logprobs_old", "logprobs_reference", "values", "kl")

# Who wrote which columns, in the order of an iteration; all others come from the rollout.
WRITTEN_BY: Mapping[str, Callable[[str], bool]] = {
    "greedy_baseline": lambda name: name == GREEDY_REWARD,
    "reward": lambda name: name in ("reward", "reward_failure", "reward_answer") or name.startswith("reward/"),
    "forward passes": lambda name: name in PASSES,
    "advantage": lambda name: name in ("advantages", "returns", "accepted", "refused"),
}
OF_PASS = {
    "old_logprobs": ("logprobs_old", "kl"),
    "reference_logprobs": ("logprobs_reference",),
    "values": ("values",),
}
STAGES = ("rollout", "reward", "greedy_baseline", "forward passes", "advantage", "updates")
OF_STAGE = {
    "old_logprobs": "forward passes",
    "reference_logprobs": "forward passes",
    "values": "forward passes",
    "update_actor": "updates",
    "update_critic": "updates",
}


@dataclass(frozen=True)
class Plan:
    """A replay, looked at before anything starts.

    Attributes:
        run: the run that is read.
        config: what was in force at the iteration.
        tasks: to run again, in the order of the iteration.
        start: progress of the newest state before the iteration that can be had.
        checkpoint: folder of that state; None: the model that the run started from.
        model: folder with that model.
        as_of: the iteration before which it was decided whose updates count: a fault undoes some.
        recorded: figures by iteration.
        state: whether the tasks need the models as they were, and not just the experience.
        engines: whether they need engines at all.
    """

    run: RunFolder
    config: TrainConfig
    iteration: int
    as_of: int
    tasks: tuple[str, ...]
    start: Progress
    checkpoint: Path | None
    model: Path
    recorded: Mapping[int, Mapping[str, float]]
    state: bool
    engines: bool

    def undone(self, number: int) -> bool:
        """Whether an iteration's updates had no effect in the end, or were left out."""
        return self.recorded.get(number, {}).get(UNDONE, self.as_of) < self.as_of

    @property
    def origin(self) -> str:
        """Where the state before the iteration comes from, in words; empty where none is needed."""
        if not self.state:
            return ""
        first = (
            f"checkpoint {self.checkpoint.name}" if self.checkpoint is not None else "the model that the run began with"
        )
        updates = f", and the updates of iterations {_in_words(self.between)} again" if self.between else ""
        return f"the models before iteration {self.iteration}: {first}{updates}"

    @property
    def between(self) -> range:
        """The iterations whose updates lead from the start's state to that before the iteration."""
        return range(self.start.iteration + 1, self.iteration)


def planned(folder: Path, iteration: int, wanted: Sequence[str] = (), as_of: int | None = None) -> Plan:
    """Look at what a run folder has for a replay.

    Args:
        wanted: tasks; none: all that can be compared.
        as_of: as in the plan; None: what was decided before the iteration, with which its batch was made.

    Raises:
        UserError: there is no such run, iteration or task, or what it needs is gone or damaged.
    """
    run = open_run_folder(folder)
    check_kind(run, "train")
    saved = read_manifest(run)
    config = _config_at(run, iteration)
    tasks = _tasks(config, [name.replace("-", "_") for name in wanted])
    state = any(_needs_state(config, name) for name in tasks)
    as_of = iteration if as_of is None else as_of
    recorded = {item["iteration"]: item["metrics"] for item in read_metrics(run)}
    bad = {number for number in recorded if _undone_later(recorded, number, as_of)}
    states = sorted({0, *(int(name) for name in checkpoints(run))} - bad)
    there = _iterations(run)
    possible = [number for number in there if not state or _start(states, number, there) is not None]
    if iteration not in possible:
        raise _not_possible(run, iteration, possible, states, missing=iteration not in there)
    start = _start(states, iteration, there) if state else _newest_before(states, iteration)
    _check_columns(run, iteration, tasks)
    checkpoint = run.checkpoint(start) if start else None
    progress = read_manifest(RunFolder(checkpoint)).progress if checkpoint is not None else Progress()
    model = Path(str(saved.model))
    if state:
        _check_state(run, checkpoint, model, range(start + 1, iteration) if start is not None else range(0))
    if (first := recorded.get(progress.iteration + 1)) is not None:
        progress = progress.advanced(overrides=live_overrides_in(first))
    engines = state or any(_needs_engines(config, name) for name in tasks)
    return Plan(run, config, iteration, as_of, tasks, progress, checkpoint, model, recorded, state, engines)


def undone_later(run: RunFolder, number: int, as_of: int) -> bool:
    """Whether the state after an iteration has an update that was undone before iteration `as_of`: it is of no use."""
    return _undone_later({item["iteration"]: item["metrics"] for item in read_metrics(run)}, number, as_of)


def _undone_later(recorded: Mapping[int, Mapping[str, float]], number: int, as_of: int) -> bool:
    return number < recorded.get(number, {}).get(UNDONE, 0) < as_of


def tasks_of(config: TrainConfig) -> list[str]:
    """Return the tasks of a training's iterations that leave something to compare, in their order."""
    algorithm, usual = config.algorithm, config.dataflow is None  # an own one may have made more of the rewards
    there = {
        "rollout": config.rollout.repeatable,
        "reward": usual,
        "greedy_baseline": "greedy" in algorithm.needs,
        "old_logprobs": config.old_logprobs_needed,
        "reference_logprobs": algorithm.reference_pass and not algorithm.full_kl,  # else it leaves hidden states
        "values": algorithm.needs_critic,
        "advantage": True,
        "update_actor": True,
        "update_critic": algorithm.needs_critic,
    }
    return [name for name, has in there.items() if has]


def _tasks(config: TrainConfig, wanted: Sequence[str]) -> tuple[str, ...]:
    known = tasks_of(config)
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(
            f"'{unknown[0]}' is no task of this training that can be replayed", f"one of: {', '.join(known)}"
        )
    if wanted:
        return tuple(name for name in known if name in wanted)
    return tuple(name for name in known if name != "rollout" or _reproducible(config))


def _reproducible(config: TrainConfig) -> bool:
    chosen = config.rollout.reproducible
    return not visible_gpus() if chosen is None else chosen


def _needs_state(config: TrainConfig, task: str) -> bool:
    if task == "reference_logprobs":
        return config.algorithm.kl is not None and config.algorithm.kl.refresh_every is not None
    return task not in ("reward", "advantage")


def _needs_engines(config: TrainConfig, task: str) -> bool:
    return task == "reference_logprobs" or (task == "reward" and config.reward.model is not None)


def _config_at(run: RunFolder, iteration: int) -> TrainConfig:
    """Return the configuration in force at an iteration: a resume may have changed it after any checkpoint."""
    later = [name for name in checkpoints(run) if int(name) >= iteration]
    return read_config(RunFolder(run.checkpoints / later[-1]) if later else run)


def _iterations(run: RunFolder) -> list[int]:
    return sorted(int(path.stem) for path in run.experiences())


def _newest_before(states: Sequence[int], iteration: int) -> int:
    """Return the newest of the states, by iterations done, from before an iteration."""
    return max(done for done in states if done < iteration)


def _start(states: Sequence[int], iteration: int, there: Sequence[int]) -> int | None:
    """Return the newest state before `iteration` if stored experience leads there; None: it does not."""
    newest = _newest_before(states, iteration)
    return newest if set(range(newest + 1, iteration)) <= set(there) else None


def _not_possible(
    run: RunFolder, iteration: int, possible: Sequence[int], states: Sequence[int], missing: bool
) -> UserError:
    why = f"{run.path} holds no experience of iteration {iteration}"
    if not missing:
        newest = _newest_before(states, iteration)
        where = f"checkpoint {newest:06d}" if newest else "the start"
        why = (
            f"the models before iteration {iteration} are gone: there is no checkpoint of the iteration before, and "
            f"not all experience since {where}"
        )
    if not possible:
        return UserError(why, "no iteration of this run can be replayed")
    return UserError(why, f"iterations that can be replayed: {_in_words(possible)}")


def _in_words(numbers: Iterable[int]) -> str:
    """Return numbers as text, those in a row as "3 to 7"."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return ", ".join(str(row[0]) if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in rows)


def _check_columns(run: RunFolder, iteration: int, tasks: Sequence[str]) -> None:
    path = run.experience(iteration)
    if (wrong := damaged(path)) is not None:
        raise UserError(f"{wrong} is damaged", "replay another iteration")
    names = column_names(path)
    needed = {"reward": "response", "advantage": "reward", "update_actor": "advantages", "update_critic": "advantages"}
    for task in tasks:
        if (name := needed.get(task, "response_tokens")) not in names:
            raise UserError(
                f"iteration {iteration} ended before '{task}': its experience has no column '{name}'",
                "name an earlier task, or another iteration",
            )


def _check_state(run: RunFolder, checkpoint: Path | None, model: Path, between: range) -> None:
    if not (model / "config.json").is_file():
        raise UserError(f"{model}, from which the run started, is gone", "put it back")
    if checkpoint is not None:
        verify_checkpoint(checkpoint, f"'penstock train --resume {run.path}' sets it aside")
    for number in between:
        _check_columns(run, number, ["update_actor"])


# ---- in the folder of the replay -------------------------------------------------------------------------------------


def lend(plan: Plan, folder: RunFolder) -> None:
    """Let the folder of a replay have what a training reads: prompts, images, and what prompts earned before."""
    for split in ("train", "heldout"):
        there, here = plan.run.prompts(split), folder.prompts(split)
        here.parent.mkdir(exist_ok=True)
        if there.exists():
            here.symlink_to(there)
    if plan.run.images.is_dir():
        folder.images.symlink_to(plan.run.images)
    if (carried := plan.run.carried(plan.iteration - 1)).exists():
        folder.carried(plan.iteration - 1).parent.mkdir(exist_ok=True)
        folder.carried(plan.iteration - 1).symlink_to(carried)
    folder.logs.mkdir(exist_ok=True)
    if plan.run.prompt_rewards.exists():
        lines = plan.run.prompt_rewards.read_text(encoding="utf-8").splitlines()
        earned = [line for line in lines if json.loads(line)["iteration"] < plan.iteration]
        memory(folder).mkdir()
        write_text(RunFolder(memory(folder)).prompt_rewards, "".join(line + "\n" for line in earned))


def memory(folder: RunFolder) -> Path:
    """Return where a replay's sampler finds what it remembers, as in the folder of a checkpoint."""
    return folder.path / "memory"


def laid_out(training: Training, plan: Plan, iteration: int, task: str) -> Stage:
    """Write the experience of an iteration into the folder of the replay as it was before `task`; return its handle."""
    stored, path = plan.run.experience(iteration), training.run.experience(iteration)
    path.parent.mkdir(exist_ok=True)
    portions = {name: value for name, value in origin_of(stored).items() if name == PORTIONS}
    write_columns(path, read_columns(stored, inputs_of(column_names(stored), task)), portions)
    return _handle(plan, iteration, path)


def stored(plan: Plan, iteration: int) -> Stage:
    """Return the handle of an iteration's experience where the run has it, which a replay must not hand to a task."""
    return _handle(plan, iteration, plan.run.experience(iteration))


def _handle(plan: Plan, iteration: int, path: Path) -> Stage:
    drawn = plan.recorded.get(iteration, {}).get("rollout/prompts_drawn", plan.config.rollout.prompts)
    return Stage(describe(path, read_columns(path, DESCRIBING), int(drawn), origin_of(path)), {})


def inputs_of(names: Iterable[str], task: str) -> list[str]:
    """Return the columns that were there before `task`."""
    before = STAGES[: STAGES.index(OF_STAGE.get(task, task))]
    return [name for name in names if _stage_of(name) in before]


def outputs_of(names: Iterable[str], task: str) -> list[str]:
    """Return the columns that `task` wrote; those of an update are in the models."""
    wrote = OF_PASS.get(task)
    return [name for name in names if (name in wrote if wrote else _stage_of(name) == OF_STAGE.get(task, task))]


def _stage_of(column: str) -> str:
    return next((stage for stage, wrote in WRITTEN_BY.items() if wrote(column)), "rollout")


def following(training: Training, plan: Plan, progress: Progress) -> Progress:
    """Return the progress after the next iteration, as its recorded figures say."""
    number = progress.iteration + 1
    figures = dict(plan.recorded.get(number, {}))
    overrides = live_overrides_in(plan.recorded[number + 1]) if number + 1 in plan.recorded else progress.overrides
    experience = plan.run.experience(number)
    return progress.advanced(
        iteration=number,
        policy_version=number,
        prompt_cursor=progress.prompt_cursor + int(figures.get("rollout/prompts_drawn", plan.config.rollout.prompts)),
        kl_coefficient=next_kl_coefficient(training, next_settings(training, progress), figures),
        overrides=overrides,
        deferred=waiting_after(origin_of(experience)) if experience.exists() else (),
    )
