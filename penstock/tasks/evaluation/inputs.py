"""What an evaluation starts from: models, the recipe by which they are evaluated, tasks of lm-evaluation-harness.

A model is a Hugging Face folder, a run of `train` or one of its checkpoints. Without a recipe that of the first run is
in force: its held-out prompts, reward, sampling and evaluators. All models answer the same prompts under the same
recipe, or a difference between them would say nothing. All that is named here is only read.

Left out: the evaluation (penstock/flows/evaluate.py), its files (penstock/tasks/evaluation/results.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import no_folder
from penstock.checks.evaluation import WITHOUT_KL, check_evaluation
from penstock.checks.found_models import with_code
from penstock.checks.hub import snapshot
from penstock.checks.model.own_code import check_noted, check_own_code
from penstock.checks.model.served import check_served_alone, check_served_images
from penstock.configs.evaluation import EvaluationConfig, evaluation_config, roles_of
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.data.source import reading_once
from penstock.session.session import read_config
from penstock.state.digests import check_signed
from penstock.state.manifest import read_manifest, verify_checkpoint
from penstock.state.mending import checkpoint_named
from penstock.state.run_folder import RunFolder, check_free, check_place, locked, read_metrics
from penstock.tasks.evaluation.harness import check_tasks
from penstock.tasks.export_run import model_of_checkpoint
from penstock.trackers.table import check_trackers

OF_RECIPES = ("train", "sft")  # kinds of runs whose configuration is a recipe for `train`
ALIKE = (  # what runs have to agree on without a recipe: what is asked, how it is sampled, what judges it
    *(f"data.{name}" for name in ("heldout", "arithmetic", "squares", "images")),
    *(f"data.{name}" for name in ("prompt", "chat", "chat_arguments", "template")),
    "data.max_prompt_tokens",
    "data.too_long",
    "reward",
    "environment",
    "rollout.max_response_tokens",
    *(f"evaluate.{name}" for name in ("prompts", "temperature", "samples")),
)


@dataclass(frozen=True)
class Subject:
    """A model to evaluate.

    Attributes:
        label: its name in tables, and that of its folder.
        folder: with its weights; of a checkpoint, the model that its run started from.
        run: whose it is; None: a Hugging Face folder's.
        checkpoint: of the run, by name; None: the weights are in `folder`.
        iteration: after which the run had these weights; the responses are sampled as those of the run's own
            evaluation then.
    """

    label: str
    folder: Path
    run: RunFolder | None = None
    checkpoint: str | None = None
    iteration: int = 0

    @property
    def source(self) -> Path:
        """Where the weights come from."""
        if self.run is None or self.checkpoint is None:
            return self.folder
        return self.run.checkpoints / self.checkpoint


@dataclass(frozen=True)
class Plan:
    """An evaluation, looked at before anything starts.

    Attributes:
        config: the recipe; None: tasks alone.
        origin: whose recipe it is, in words.
        reference: folder of the model that `kl` compares with.
        tasks: of lm-evaluation-harness.
        include_path: folder with tasks of the user's own.
        parent: directory of the run folders, which has the tracker's store.
        to: folder for the results; None: a new one below `parent`.
    """

    subjects: tuple[Subject, ...]
    config: TrainConfig | None
    origin: str
    reference: Path | None
    tasks: tuple[str, ...]
    include_path: Path | None
    parent: Path
    to: Path | None

    @property
    def own_tasks(self) -> str | None:
        """The folder with tasks of the user's own, as it is handed to a task."""
        return None if self.include_path is None else str(self.include_path)

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one engine."""
        return 1 if self.config is None else self.config.rollout.tensor_parallel

    @property
    def chat(self) -> bool:
        """Whether the model's chat template is put around a prompt."""
        return self.config is not None and self.config.data.chat

    def engines(self, subject: Subject, folder: Path | None = None) -> EvaluationConfig:
        """Return the tree with which engines start for a model.

        Args:
            folder: where its weights are; None: as in the subject.
        """
        assert self.config is not None
        return evaluation_config(self.config, folder or subject.folder, self.reference)


def planned(
    models: Sequence[str],
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
    include_path: str | None = None,
    to: str | None = None,
) -> Plan:
    """Look at what an evaluation needs; arguments as those of the flow.

    Raises:
        UserError: a model, the recipe or a task is not there or cannot work, or the folder is taken.
    """
    if not models:
        raise UserError("no model given", "name a Hugging Face folder, a run, or a checkpoint of one")
    subjects = _distinct([subject_of(Path(name)) for name in models])
    own = None if include_path is None else Path(include_path)
    check_tasks(tasks, own)
    for subject in subjects if tasks else ():
        check_served_images(subject.folder)
        check_served_alone(subject.folder)
    config, origin = _recipe(subjects, recipe, overrides, bool(tasks))
    first = next((subject.run for subject in subjects if subject.run is not None), None)
    parent = first.path.parent if first is not None else Path((config or TrainConfig()).folder)
    if to is not None:
        check_free(Path(to))
    check_place(Path(to) if to is not None else parent)
    reference = None if config is None else _reference(config, first if recipe is None else None)
    target = None if to is None else Path(to)
    plan = Plan(subjects, config, origin, reference, tuple(tasks), own, parent, target)
    _check(plan)
    return plan


@reading_once()
def _check(plan: Plan) -> None:
    check_trackers(names_of_trackers((plan.config or TrainConfig()).record.tracker))
    for subject in plan.subjects:
        if plan.config is not None:
            check_noted(plan.config.model, str(subject.folder), subject.folder)
            check_evaluation(plan.engines(subject))
        if plan.tasks:
            check_own_code(
                subject.folder, "a model", None, "leave the tasks out: lm-evaluation-harness is given no code"
            )


def subject_of(path: Path) -> Subject:
    """Return what a path means: a Hugging Face folder, a model of the Hub, a checkpoint of a run, or a run.

    Raises:
        UserError: none of these, or a run without trained weights.
    """
    if (folder := snapshot(str(path), "a model")) is not None:
        return Subject(path.name.partition("@")[0], folder)
    path = path.resolve()
    if (path / "config.json").is_file():
        own = path.parent.name == "models" and (path.parents[1] / "config.yaml").is_file()
        return Subject(f"{path.parents[1].name}-{path.name}" if own else path.name, path)
    if path.parent.name == "checkpoints" and (path.parents[1] / "config.yaml").is_file():
        return _checkpoint(RunFolder(path.parents[1]), path.name)
    if not path.is_dir():
        raise UserError(no_folder(path), "name a Hugging Face folder, a run, or a checkpoint of one")
    if not (path / "config.yaml").is_file():
        raise UserError(
            f"{path} is neither a model, a run nor a checkpoint",
            "name the folder with the model's config.json, or that of a run",
        )
    run = RunFolder(path)
    if (final := run.model("final")).is_dir():
        records = read_metrics(run) if run.prompts("train").is_file() else []
        return Subject(run.name, final, run, None, records[-1]["iteration"] if records else 0)
    newest = read_manifest(run).checkpoint
    if newest is None:
        raise UserError(f"{path} has no checkpoint yet, so there are no trained weights", "let it train on")
    return _checkpoint(run, newest)


def _checkpoint(run: RunFolder, name: str) -> Subject:
    """Return a checkpoint of a run that nobody trains: there, checkpoints come and go."""
    folder = run.checkpoints / checkpoint_named(run, name)
    if run.lock.exists():
        with locked(run):
            pass
    saved = verify_checkpoint(folder, "name another one")
    return Subject(f"{run.name}-{folder.name}", Path(str(saved.model)), run, folder.name, saved.progress.iteration)


def _distinct(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Let every model have a label of its own; the second of a name gets a number."""
    seen: Counter[str] = Counter()
    named = []
    for subject in subjects:
        label = re.sub(r"[^\w.-]+", "-", subject.label)
        seen[label] += 1
        named.append(replace(subject, label=label if seen[label] == 1 else f"{label}-{seen[label]}"))
    return tuple(named)


def _recipe(
    subjects: Sequence[Subject], recipe: str | None, overrides: Sequence[str], has_tasks: bool
) -> tuple[TrainConfig | None, str]:
    """Return the recipe in force and whose it is; none where there are tasks alone."""
    if recipe is not None:
        return with_code(load_config(Path(recipe), overrides)), recipe
    runs = [subject.run for subject in subjects if subject.run is not None and _has_recipe(subject.run)]
    if runs:
        _check_alike(runs)
        check_signed(runs[0].config, "name a recipe")
        return with_code(load_config(runs[0].config, overrides)), f"that of {runs[0].path}"
    if overrides:
        raise UserError(f"'{overrides[0]}' changes a recipe, and none is given", "name one after the models")
    if not has_tasks:
        raise UserError(
            "no recipe given: nothing says what the model is asked and how its responses are judged",
            "name one after the models, e.g. penstock evaluate MODEL recipe.yaml; a run has its own",
        )
    return None, ""


def _has_recipe(run: RunFolder) -> bool:
    return not run.manifest.is_file() or read_manifest(run).kind in (None, *OF_RECIPES)


def _check_alike(runs: Sequence[RunFolder]) -> None:
    """Refuse runs whose own evaluations are of different prompts, or otherwise sampled or judged."""
    first = read_config(runs[0])
    for run in runs[1:]:
        other = read_config(run)
        if differing := [key for key in ALIKE if attrgetter(key)(first) != attrgetter(key)(other)]:
            raise UserError(
                f"{runs[0].path} and {run.path} were evaluated differently: {', '.join(differing)}",
                f"name the recipe for all of them, for example {runs[0].config}",
            )


def _reference(config: TrainConfig, run: RunFolder | None) -> Path | None:
    """Return the folder of the reference: what a run began with, or else the recipe's model.

    Raises:
        UserError: the run's reference has been refreshed, and no folder holds it.
    """
    if "reference" not in roles_of(config):
        return None
    kl = config.algorithm.kl
    if kl is not None and kl.refresh_every is not None:
        raise UserError("the evaluator 'kl' compares with a reference that the training refreshes", WITHOUT_KL)
    if run is not None:
        return Path(str(read_manifest(run).model))
    return None if config.model.path is None else Path(config.model.path)


@contextmanager
def weights_of(subject: Subject, folder: Path) -> Iterator[Path]:
    """Yield the folder with a model's weights; those of a checkpoint are written to `folder` for so long.

    Raises:
        UserError: the run is being trained, or the checkpoint is damaged.
    """
    if subject.run is None or subject.checkpoint is None:
        yield subject.folder
        return
    with model_of_checkpoint(subject.run, subject.checkpoint, folder) as written:
        yield written
