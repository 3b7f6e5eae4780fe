"""Commands that train a model, and the keys that their recipes may have.

Heavy imports stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.base.errors import UserError
from penstock.cli.running import ending_in_words, new_folder, print_summary
from penstock.cli.terminal import console, escaped, short_path

if TYPE_CHECKING:
    from penstock.checks.memory import GroupEstimate
    from penstock.cli.starting import Asked
    from penstock.configs.schema import TrainConfig
    from penstock.session.opening import Kind, Resume, Tree

A_RECIPE = "name one: penstock train configs/quickstart.yaml"

Recipe = Annotated[Path | None, typer.Argument(help="YAML recipe, e.g. configs/quickstart.yaml; none with --resume")]

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value in place of the recipe's, e.g. rollout.samples=16")
]

PairOverrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value in place of the recipe's, e.g. trainer.steps=500")
]

RunFolderOption = Annotated[
    Path | None, typer.Option("--run", help="folder for this run; default: a new one in the recipe's 'folder', runs")
]

RESUME = "folder of a run to continue, without one the newest of the recipe's name; some keys may change, e.g. "

ResumeOption = Annotated[Path | None, typer.Option("--resume", help=RESUME + "iterations=200")]

StepsResumeOption = Annotated[Path | None, typer.Option("--resume", help=RESUME + "those of its steps")]

FromOption = Annotated[
    str | None,
    typer.Option("--from", help="checkpoint of the run to continue, e.g. 000010; what came after it is taken back"),
]

NoFromOption = Annotated[str | None, typer.Option("--from", hidden=True)]  # of steps one checkpoint is kept

StepsDryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="print configuration, placement, memory, data and disk, and leave")
]


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    run: RunFolderOption = None,
    resume: ResumeOption = None,
    start: FromOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="print configuration, placement, memory, prompts and a reward, and leave"),
    ] = False,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="start it again with --resume where its own process is killed")
    ] = False,
) -> None:
    """Train a policy with reinforcement learning."""
    from penstock.cli.prefect.server import check_server
    from penstock.cli.runs.newest import with_newest_run
    from penstock.cli.starting import Asked, config_to_resume, new_config
    from penstock.data.source import reading_once
    from penstock.session.opening import TRAIN, Resume, foreseen

    if resume is None and start is not None:
        raise UserError("--from names a checkpoint of a run to continue", "say which with --resume RUN")
    asked = with_newest_run(TRAIN, Asked(recipe, overrides, run, resume))
    going_on = None if asked.resume is None else Resume(asked.resume, start, asked.changes)
    if going_on is not None and _is_complete(TRAIN, going_on):
        return
    with reading_once():
        config = new_config(TRAIN, asked, A_RECIPE) if going_on is None else config_to_resume(TRAIN, going_on)
        seen = None if config is None else foreseen(TRAIN, config)
        if dry_run:
            _print_dry_run(config, seen, asked.resume)
            return
        check_server()  # before there is a folder that nothing will be in
        if keep_alive:
            raise typer.Exit(_kept_alive(config, asked, start))
        if going_on is not None:
            told = {"resume": str(asked.resume), "from_checkpoint": start, "changes": list(going_on.changes)}
            _run_flow(config, going_on.folder, **told)
        else:
            folder = new_folder(config, run)
            _run_flow(config, folder, run_folder=str(folder))


def _kept_alive(config: TrainConfig | None, asked: Asked, start: str | None) -> int:
    """Train in a process of its own, and again where it is killed; return the exit code."""
    from penstock.cli.keeping_alive import kept_alive
    from penstock.configs.schema import TrainConfig

    overrides = asked.overrides or []
    if asked.resume is not None:
        folder, words = asked.resume, ["--resume", str(asked.resume), *asked.changes]
        words += ["--from", start] if start is not None else []
    else:
        folder = new_folder(config, asked.run)
        words = [str(asked.recipe), *overrides, "--run", str(folder)]
    engine = (config or TrainConfig()).engine
    return kept_alive(["train", *words], folder, engine.restarts, engine.restart_window_s)


def _print_dry_run(
    config: TrainConfig | None, seen: tuple[list[GroupEstimate], str] | None, resume: Path | None
) -> None:
    from penstock.cli.dry_run import print_dry_run
    from penstock.state.run_folder import RunFolder, read_metrics

    if config is None or seen is None:
        raise _damaged(resume)
    history = [] if resume is None else [dict(record["metrics"]) for record in read_metrics(RunFolder(resume))]
    print_dry_run(config, *seen, history, console)


def _damaged(run: Path | None) -> UserError:
    return UserError(f"{run} is damaged", "without --dry-run what is damaged is set aside, and it goes on")


def _is_complete(kind: Kind[Tree], resume: Resume) -> bool:
    """Say so if nothing of a run is left to do."""
    from penstock.session.opening import is_complete

    done = is_complete(kind, resume)
    if done:
        console.print(
            f"{short_path(resume.folder)} is complete: nothing is left to do", highlight=False, soft_wrap=True
        )
        print_summary(resume.run.path)
    return done


def _run_flow(config: TrainConfig | None, folder: Path, **arguments: Any) -> None:
    from penstock.flows.train import train as train_flow

    with ending_in_words("train", folder):
        train_flow(None if "resume" in arguments else config, **arguments)  # a run that goes on has its own
    print_summary(folder.resolve())


def sft(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe with a section 'sft'; none with --resume")] = None,
    overrides: Overrides = None,
    run: RunFolderOption = None,
    resume: StepsResumeOption = None,
    start: NoFromOption = None,
    dry_run: StepsDryRunOption = False,
) -> None:
    """Train a model on prompts and responses alone: the section 'sft' of a recipe for 'train'."""
    from penstock.cli.starting import Asked
    from penstock.flows.sft import sft as sft_flow
    from penstock.session.opening import SFT

    _finetune(SFT, sft_flow, Asked(recipe, overrides, run, resume), start, dry_run)


def preference(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML recipe, e.g. configs/dpo.yaml; none with --resume")
    ] = None,
    overrides: PairOverrides = None,
    run: RunFolderOption = None,
    resume: StepsResumeOption = None,
    start: NoFromOption = None,
    dry_run: StepsDryRunOption = False,
) -> None:
    """Train a model on preferences: DPO, cDPO, IPO, ORPO or KTO."""
    from penstock.cli.starting import Asked
    from penstock.flows.preference import preference as preference_flow
    from penstock.session.opening import PREFERENCE

    _finetune(PREFERENCE, preference_flow, Asked(recipe, overrides, run, resume), start, dry_run)


def reward_model(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML recipe, e.g. configs/reward_model.yaml; none with --resume")
    ] = None,
    overrides: PairOverrides = None,
    run: RunFolderOption = None,
    resume: StepsResumeOption = None,
    start: NoFromOption = None,
    dry_run: StepsDryRunOption = False,
) -> None:
    """Train a reward model on pairs of responses."""
    from penstock.cli.starting import Asked
    from penstock.flows.reward_model import reward_model as reward_model_flow
    from penstock.session.opening import REWARD_MODEL

    _finetune(REWARD_MODEL, reward_model_flow, Asked(recipe, overrides, run, resume), start, dry_run)


def _finetune(kind: Kind[Tree], flow: Callable[..., str], asked: Asked, start: str | None, dry_run: bool) -> None:
    """Start or resume a flow of its own before reinforcement learning; print what it has come to."""
    from penstock.cli.dry_run import print_dry_run_of_steps
    from penstock.cli.prefect.server import check_server
    from penstock.cli.runs.newest import with_newest_run
    from penstock.cli.starting import config_to_resume, new_config
    from penstock.data.source import reading_once
    from penstock.session.opening import Resume, foreseen

    if start is not None:
        raise UserError(
            f"'penstock {kind.name}' keeps its newest checkpoint alone: there is none to go back to", "remove --from"
        )
    asked = with_newest_run(kind, asked)
    going_on = None if asked.resume is None else Resume(asked.resume, None, asked.changes)
    if going_on is not None and _is_complete(kind, going_on):
        return
    with reading_once():
        example = "docs/recipes.md, 'Before reinforcement learning', shows one"
        config = new_config(kind, asked, example) if going_on is None else config_to_resume(kind, going_on)
        seen = None if config is None else foreseen(kind, config)
        if dry_run:
            if config is None or seen is None:
                raise _damaged(asked.resume)
            print_dry_run_of_steps(config, *seen, None if going_on is None else going_on.run, console)
            return
        check_server()
        if going_on is None:
            folder = new_folder(config, asked.run, kind.suffix)
            told: dict[str, Any] = {"run_folder": str(folder)}
        else:
            folder = going_on.run.path
            told = {"resume": str(folder), "changes": list(going_on.changes)}
        with ending_in_words(kind.name, folder):
            flow(config if going_on is None else None, **told)  # a run that goes on has its own
    print_summary(folder)


class RecipeKind(StrEnum):
    """Kinds of recipes, by the command that takes them."""

    TRAIN = "train"
    PREFERENCE = "preference"
    REWARD_MODEL = "reward-model"


def keys(
    kind: Annotated[
        RecipeKind, typer.Argument(help="command whose recipes are meant; sft takes those of train")
    ] = RecipeKind.TRAIN,
) -> None:
    """List every key of a recipe with type, default and meaning."""
    from pydantic import BaseModel
    from rich.table import Table

    from penstock.configs.loading.keys import describe_keys
    from penstock.configs.preference import PreferenceConfig, RewardModelConfig
    from penstock.configs.schema import TrainConfig

    trees: dict[str, type[BaseModel]] = {
        "train": TrainConfig,
        "preference": PreferenceConfig,
        "reward-model": RewardModelConfig,
    }
    table = Table("key", "type", "default", "meaning")
    for key in describe_keys(trees[kind]):
        table.add_row(key.name, escaped(key.type), escaped(key.default), escaped(key.description))
    console.print(table)
