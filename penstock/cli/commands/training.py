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
from penstock.cli.running import ending_in_words, new_folder, print_accuracy, print_summary
from penstock.cli.terminal import console, escaped, short_path

if TYPE_CHECKING:
    from configs.schema import TrainConfig
    from penstock.checks.memory import GroupEstimate
    from penstock.cli.starting import Asked
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

ResumeOption = Annotated[Path | None, typer.Option("--resume", help="folder of an interrupted run to continue")]

TrainResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", help="folder of a run to continue; some keys may change, e.g. iterations=200"),
]

FromOption = Annotated[
    str | None,
    typer.Option("--from", help="checkpoint of the run to continue, e.g. 000010; what came after it is taken back"),
]


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    run: RunFolderOption = None,
    resume: TrainResumeOption = None,
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
    from penstock.checks.memory import Elsewhere
    from penstock.cli.prefect.server import check_server
    from penstock.cli.starting import Asked, config_to_resume, new_config
    from penstock.data.source import reading_once
    from penstock.session.machines.pools import gpus_of_pools
    from penstock.session.opening import TRAIN, Resume

    if resume is None and start is not None:
        raise UserError("--from names a checkpoint of a run to continue", "say which with --resume RUN")
    asked = Asked(recipe, overrides, run, resume)
    going_on = None if resume is None else Resume(resume, start, asked.changes)
    if going_on is not None and _is_complete(going_on):
        return
    with reading_once():
        config = new_config(TRAIN, asked, A_RECIPE) if going_on is None else config_to_resume(TRAIN, going_on)
        memory = None if config is None else TRAIN.memory(config, Elsewhere(gpus_of_pools(config)))
        if dry_run:
            _print_dry_run(config, memory, resume)
            return
        check_server()  # before there is a folder that nothing will be in
        if keep_alive:
            raise typer.Exit(_kept_alive(config, asked, start))
        if going_on is not None:
            told = {"resume": str(resume), "from_checkpoint": start, "changes": list(going_on.changes)}
            _run_flow(config, going_on.folder, **told)
        else:
            folder = new_folder(config, run)
            _run_flow(config, folder, run_folder=str(folder))


def _kept_alive(config: TrainConfig | None, asked: Asked, start: str | None) -> int:
    """Train in a process of its own, and again where it is killed; return the exit code."""
    from configs.schema import TrainConfig
    from penstock.cli.keeping_alive import kept_alive

    overrides = asked.overrides or []
    if asked.resume is not None:
        folder, words = asked.resume, ["--resume", str(asked.resume), *asked.changes]
        words += ["--from", start] if start is not None else []
    else:
        folder = new_folder(config, asked.run)
        words = [str(asked.recipe), *overrides, "--run", str(folder)]
    engine = (config or TrainConfig()).engine
    return kept_alive(["train", *words], folder, engine.restarts, engine.restart_window_s)


def _print_dry_run(config: TrainConfig | None, memory: list[GroupEstimate] | None, resume: Path | None) -> None:
    from penstock.cli.dry_run import print_dry_run
    from penstock.state.run_folder import RunFolder, read_metrics

    if config is None or memory is None:
        raise UserError(f"{resume} is damaged", "without --dry-run what is damaged is set aside, and it goes on")
    history = [] if resume is None else [dict(record["metrics"]) for record in read_metrics(RunFolder(resume))]
    print_dry_run(config, memory, history, console)


def _is_complete(resume: Resume) -> bool:
    """Say so if nothing of a run is left to do."""
    from penstock.session.opening import is_complete

    done = is_complete(resume)
    if done:
        console.print(
            f"{short_path(resume.folder)} is complete: nothing is left to do", highlight=False, soft_wrap=True
        )
        print_summary(resume.run.path)
    return done


def _run_flow(config: Any, folder: Path, **arguments: Any) -> None:
    from configs.schema import TrainConfig
    from flows.train import train as train_flow

    with ending_in_words("train", folder):
        train_flow(config or TrainConfig(), **arguments)
    print_summary(folder.resolve())


def sft(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe with a section 'sft'; none with --resume")] = None,
    overrides: Overrides = None,
    run: RunFolderOption = None,
    resume: ResumeOption = None,
) -> None:
    """Train a model on prompts and responses alone: the section 'sft' of a recipe for 'train'."""
    from flows.sft import sft as sft_flow
    from penstock.cli.starting import Asked
    from penstock.session.opening import SFT

    _finetune(SFT, sft_flow, Asked(recipe, overrides, run, resume))


def preference(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML recipe, e.g. configs/dpo.yaml; none with --resume")
    ] = None,
    overrides: PairOverrides = None,
    run: RunFolderOption = None,
    resume: ResumeOption = None,
) -> None:
    """Train a model on preferences: DPO, cDPO, IPO, ORPO or KTO."""
    from flows.preference import preference as preference_flow
    from penstock.cli.starting import Asked
    from penstock.session.opening import PREFERENCE

    _finetune(PREFERENCE, preference_flow, Asked(recipe, overrides, run, resume))


def reward_model(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML recipe, e.g. configs/reward_model.yaml; none with --resume")
    ] = None,
    overrides: PairOverrides = None,
    run: RunFolderOption = None,
    resume: ResumeOption = None,
) -> None:
    """Train a reward model on pairs of responses."""
    from flows.reward_model import reward_model as reward_model_flow
    from penstock.cli.starting import Asked
    from penstock.session.opening import REWARD_MODEL

    _finetune(REWARD_MODEL, reward_model_flow, Asked(recipe, overrides, run, resume))


def _finetune(kind: Kind[Tree], flow: Callable[..., str], asked: Asked) -> None:
    """Start or resume a flow of its own before reinforcement learning; print where its model is."""
    from penstock.cli.prefect.server import check_server
    from penstock.cli.starting import config_to_resume, new_config
    from penstock.data.source import reading_once
    from penstock.session.opening import Resume

    if asked.resume is not None and not (asked.recipe is None and asked.run is None):
        raise UserError("--resume continues a run with its own configuration", "remove the recipe, overrides and --run")
    with reading_once():
        if asked.resume is None:
            config: Tree | None = new_config(kind, asked, "docs/recipes.md, 'Before reinforcement learning', shows one")
            check_server()
            folder = new_folder(config, asked.run, kind.suffix)
            told = {"run_folder": str(folder)}
        else:
            going_on = Resume(asked.resume)
            config, folder = config_to_resume(kind, going_on), going_on.run.path
            check_server()
            told = {"resume": str(folder)}
        with ending_in_words(kind.name, folder):
            console.print(f"model: {flow(config or kind.tree(), **told)}", highlight=False, soft_wrap=True)
    print_accuracy(folder)


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

    from configs.loading.keys import describe_keys
    from configs.preference import PreferenceConfig, RewardModelConfig
    from configs.schema import TrainConfig

    trees: dict[str, type[BaseModel]] = {
        "train": TrainConfig,
        "preference": PreferenceConfig,
        "reward-model": RewardModelConfig,
    }
    table = Table("key", "type", "default", "meaning")
    for key in describe_keys(trees[kind]):
        table.add_row(key.name, escaped(key.type), escaped(key.default), escaped(key.description))
    console.print(table)
