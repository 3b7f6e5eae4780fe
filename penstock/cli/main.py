"""The command `penstock`: thin calls into flows, and errors as sentences.

A user's mistake ends with its message and exit code 2, without a traceback, before any engine starts. Heavy imports
stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from penstock import __version__
from penstock.base.errors import UserError
from penstock.cli import bench
from penstock.cli.failures import MISTAKE, told
from penstock.cli.terminal import console, errors, escaped, short_path

if TYPE_CHECKING:
    from configs.schema import TrainConfig
    from penstock.checks.memory import GroupEstimate
    from penstock.cli.starting import Asked
    from penstock.session.opening import Kind, Resume, Tree

ABOUT = "Post-train language models with reinforcement learning, as a Prefect workflow."

FIRST = "A first run: penstock train configs/quickstart.yaml. What a recipe may say: penstock keys."

A_RECIPE = "name one: penstock train configs/quickstart.yaml"

TRAINING, LOOKING, MODELS, MACHINE = "Train", "Follow and compare runs", "Use a trained model", "Prepare the machine"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT, epilog=FIRST)

app.add_typer(bench.app, name="bench", rich_help_panel=MACHINE)

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


def main() -> None:
    """Run the command line; the console script's entry point."""
    sys.path.append(str(Path.cwd()))  # reward functions are named from here; last: a user's tasks.py hides no room
    _quiet_libraries()
    code = None
    try:
        code = app(standalone_mode=False)
    except typer.Abort:  # what older Typers make of Ctrl-C in a command; newer ones return 130
        code = 130
    except Exception as error:
        if hasattr(error, "format_message"):
            _fail(error.format_message())  # click's own usage errors; empty where the help is the answer
        if (failure := told(error, sys.argv[1:])) is None:
            raise
        _fail(*failure)
    if code:
        if code == 130:
            errors.print("stopped")
        raise SystemExit(code)


def _fail(message: str, code: int = MISTAKE) -> NoReturn:
    if message:
        errors.print(f"[bold red]error:[/] {escaped(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"penstock {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - the callback has done all
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None: ...


def _quiet_libraries() -> None:
    """Set what libraries read at import: no telemetry, no hub, their news below warnings kept to log files."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    defaults = {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),  # Prefect 3.7 looks in ~/.prefect for these
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),  # two, whatever its home is
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@app.command(rich_help_panel=TRAINING)
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
) -> None:
    """Train a policy with reinforcement learning."""
    from penstock.cli.prefect.server import check_server
    from penstock.cli.starting import Asked, new_config, resumed_config
    from penstock.data.source import reading_once
    from penstock.session.opening import TRAIN, Resume

    if resume is None and start is not None:
        raise UserError("--from names a checkpoint of a run to continue", "say which with --resume RUN")
    asked = Asked(recipe, overrides, run, resume)
    going_on = None if resume is None else Resume(resume, start, asked.changes)
    if going_on is not None and _is_complete(going_on):
        return
    with reading_once():
        config = new_config(TRAIN, asked, A_RECIPE) if going_on is None else resumed_config(TRAIN, going_on)
        memory = None if config is None else TRAIN.memory(config)
        if dry_run:
            _print_dry_run(config, memory, resume)
            return
        check_server()  # before there is a folder that nothing will be in
        if going_on is not None:
            told = {"resume": str(resume), "from_checkpoint": start, "changes": list(going_on.changes)}
            _run_flow(config, going_on.folder, **told)
        else:
            folder = _new_folder(config, run)
            _run_flow(config, folder, run_folder=str(folder))


def _print_dry_run(config: TrainConfig | None, memory: list[GroupEstimate] | None, resume: Path | None) -> None:
    from penstock.cli.dry_run import print_dry_run

    if config is None or memory is None:
        raise UserError(f"{resume} is damaged", "without --dry-run what is damaged is set aside, and it goes on")
    print_dry_run(config, memory, console)


def _new_folder(config: Any, run: Path | None, suffix: str = "") -> Path:
    """Make the run folder and say where it is, so that an interrupted run can be found."""
    from penstock.state.run_folder import drop_if_empty, new_run_folder

    theirs = run is not None and run.exists()
    folder = new_run_folder(Path(config.folder), config.name + suffix, run).path
    console.print(f"run folder: {short_path(folder)}", highlight=False, soft_wrap=True)
    if not theirs:
        atexit.register(drop_if_empty, folder)  # stopped before the flow wrote to it: nobody could resume it
    return folder


def _is_complete(resume: Resume) -> bool:
    """Say so if nothing of a run is left to do."""
    from penstock.session.opening import is_complete

    done = is_complete(resume)
    if done:
        console.print(
            f"{short_path(resume.folder)} is complete: nothing is left to do", highlight=False, soft_wrap=True
        )
        _print_summary(resume.run.path)
    return done


def _run_flow(config: Any, folder: Path, **arguments: Any) -> None:
    from configs.schema import TrainConfig
    from flows.train import train as train_flow

    with _ending_in_words("train", folder):
        train_flow(config or TrainConfig(), **arguments)
    _print_summary(folder.resolve())


@contextmanager
def _ending_in_words(command: str, folder: Path) -> Iterator[None]:
    """Start Prefect's server for a flow in the block; where the flow does not end well, say how to go on."""
    from penstock.cli.prefect.quiet import quiet_terminal
    from penstock.cli.prefect.server import Terminated, start_server
    from penstock.cli.starting import how_to_go_on

    start_server()
    try:
        with quiet_terminal():
            yield
    except (KeyboardInterrupt, Terminated) as end:
        how = how_to_go_on(command, folder)
        errors.print(f"stopped, the engines are down. {how}", highlight=False, soft_wrap=True)
        raise SystemExit(130 if isinstance(end, KeyboardInterrupt) else end.code) from None
    except Exception as error:
        error.add_note(how_to_go_on(command, folder))
        raise


def _print_summary(folder: Path) -> None:
    from penstock.cli.pages import pages_of_run
    from penstock.reports.progress import print_summary
    from penstock.state.run_folder import RunFolder

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    places = {
        "Run folder": str(folder),
        "Report": str(RunFolder(folder).report),
        "Model": str(folder / "models" / "final"),
        "Serve it": f"penstock serve {quote(short_path(folder))}",
        **pages_of_run(summary, f"penstock ui {quote(short_path(folder.parent))}"),
    }
    print_summary(console, summary, places)


@app.command(rich_help_panel=TRAINING)
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


@app.command(rich_help_panel=TRAINING)
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


@app.command("reward-model", rich_help_panel=TRAINING)
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
    from penstock.cli.starting import new_config, resumed_config
    from penstock.data.source import reading_once
    from penstock.session.opening import Resume

    if asked.resume is not None and not (asked.recipe is None and asked.run is None):
        raise UserError("--resume continues a run with its own configuration", "remove the recipe, overrides and --run")
    with reading_once():
        if asked.resume is None:
            config: Tree | None = new_config(kind, asked, "docs/recipes.md, 'Before reinforcement learning', shows one")
            check_server()
            folder = _new_folder(config, asked.run, kind.suffix)
            told = {"run_folder": str(folder)}
        else:
            going_on = Resume(asked.resume)
            config, folder = resumed_config(kind, going_on), going_on.run.path
            check_server()
            told = {"resume": str(folder)}
        with _ending_in_words(kind.name, folder):
            console.print(f"model: {flow(config or kind.tree(), **told)}", highlight=False, soft_wrap=True)
    _print_accuracy(folder)


def _print_accuracy(folder: Path) -> None:
    """Say what was measured on held-out pairs; prompts with responses have no such figure."""
    if not (folder / "summary.json").is_file():
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if (accuracy := summary.get("heldout_accuracy")) is not None:
        console.print(f"held-out accuracy: {accuracy:.3f}", highlight=False)


@app.command(rich_help_panel=MACHINE)
def doctor(
    target: Annotated[Path, typer.Argument(help="directory of the run folders, or a recipe to check as well")] = Path(
        "runs"
    ),
    overrides: Overrides = None,
) -> None:
    """Check the machine: driver, libraries, GPUs, links, memory, disk; exit code 1 if something would stop a run."""
    from configs.loading.load import load_config
    from penstock.doctor.doctor import diagnose, examine_recipe, table
    from penstock.doctor.machine_facts import collect

    if target.suffix in (".yaml", ".yml"):
        config = load_config(target, overrides or ())
        about_recipe, disk_needed = examine_recipe(config)
        lines = [*diagnose(collect(Path(config.folder)), disk_needed), *about_recipe]
    elif overrides:
        raise UserError(
            f"{target} is no recipe, so there is nothing to override", "name a YAML file, or a folder alone"
        )
    else:
        lines = diagnose(collect(target))
    console.print(table(lines))
    if any(line.level == "problem" for line in lines):
        raise SystemExit(1)


class RecipeKind(StrEnum):
    """Kinds of recipes, by the command that takes them."""

    TRAIN = "train"
    PREFERENCE = "preference"
    REWARD_MODEL = "reward-model"


@app.command(rich_help_panel=TRAINING)
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


@app.command(rich_help_panel=LOOKING)
def compare(
    experiment: Annotated[str, typer.Argument(help="experiment (record.experiment of a recipe) in MLflow")],
    runs: Annotated[list[str] | None, typer.Argument(help="names or ids of runs; default: all of them")] = None,
    folder: Annotated[Path, typer.Option(help="directory of the run folders")] = Path("runs"),
) -> None:
    """Show runs side by side: results and the parameters that differ; tables and curves go to FOLDER/comparisons."""
    from penstock.reports.compare import render
    from tasks.compare import compare_into_folder

    comparison, target = compare_into_folder(experiment, runs, folder)
    console.print(render(comparison))
    console.print(f"files: {target}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=LOOKING)
def sync(run: Annotated[Path, typer.Argument(help="folder of a run that has ended")]) -> None:
    """Give a run's tracker what it lacks because its server was away."""
    from penstock.cli.sync import sync as deliver

    console.print(deliver(run), highlight=False, markup=False, soft_wrap=True)


@app.command("set", rich_help_panel=LOOKING)
def set_live(
    run: Annotated[Path, typer.Argument(help="folder of a running training")],
    values: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, e.g. rollout.temperature=0.9; a key that cannot change is refused"),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="take all of them back: the recipe's values hold again")
    ] = False,
) -> None:
    """Change values of a running training from its next iteration on."""
    from configs.tree.recipes import dump
    from penstock.cli.prefect.live import clear_overrides, set_overrides

    if clear == bool(values):
        raise UserError("give values or --clear, one of them", "for example penstock set RUN rollout.temperature=0.9")
    name, overrides = (clear_overrides(run), {}) if clear else set_overrides(run, values or [])
    what = f":\n{dump(overrides).rstrip()}" if overrides else " the recipe's values are in force again"
    said = f"from the next iteration on{what}\nPrefect Variable: {name}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)


@app.command(rich_help_panel=MACHINE)
def deploy(pool: Annotated[str, typer.Option(help="process work pool that runs the flows")] = "penstock") -> None:
    """Put Penstock on a Prefect server: pool, GPU slots, automation and the deployments of prefect.yaml."""
    from rich.table import Table

    from penstock.cli.prefect.deploy import deploy as deploy_all
    from penstock.cli.prefect.deploy import next_commands

    table = Table("what", "name", "detail")
    for row in deploy_all(pool):
        table.add_row(*row)
    console.print(table)
    commands = "\n  ".join(next_commands(pool))
    console.print(f"Next, a worker and a first run:\n  {commands}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=MODELS)
def export(
    run: Annotated[
        Path, typer.Argument(help="folder of a run; of one that has not ended its newest checkpoint counts")
    ],
    to: Annotated[Path | None, typer.Option(help="folder to write; default: models/export of the run")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="most bytes of a weights file, e.g. 2GB; default: as they are, else 5GB")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face folder with a card, compare it with its source, tell its tracker of it."""
    from penstock.cli.export_run import export_run
    from penstock.state.manifest import ANEW
    from penstock.state.run_folder import open_run_folder

    folder = open_run_folder(run)
    if not folder.manifest.is_file():
        raise UserError(f"{run} has no model to export: it ended early", ANEW)
    done = export_run(folder, to, max_shard_size)
    proof = done.proof
    known = f"model {done.model}" if done.model else "not registered: its store keeps no models or lacks the run"
    lines = [
        f"model: {done.folder}",
        f"weights: from {done.source}, {proof.dtype}, all {proof.tensors} tensors equal",
        f"logits: {proof.prompts} prompts, within {proof.logit_difference:.3g} (tolerance {proof.logit_tolerance:.3g})",
        *([f"{done.tracker}: {known}"] if done.tracker else []),
        f"serve it: penstock serve {quote(short_path(done.folder))}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command(rich_help_panel=MODELS)
def serve(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, or the folder of a run with a model")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on the loopback interface")] = 8000,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.05, max=0.98, help="share of the GPU's memory for vLLM; default 0.8")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name that requests give the model; default: its folder's")] = None,
) -> None:
    """Serve a language model or a reward model with vLLM's server until Ctrl-C (OpenAI's API, loopback only)."""
    from penstock.cli.serving.serve import model_folder
    from penstock.cli.serving.serve import serve as serve_folder

    serve_folder(
        model_folder(model),
        port,
        gpu_memory,
        lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        name,
    )


@app.command(rich_help_panel=MODELS)
def loadtest(
    url: Annotated[str, typer.Argument(help="server with OpenAI's API, e.g. http://127.0.0.1:8000")],
    users: Annotated[int, typer.Option(min=1, help="users that ask at the same time")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="how many they ask together")] = 200,
    prompts: Annotated[
        str, typer.Option(help="random ones of so many tokens, or those of a file: one a line, or JSONL with 'prompt'")
    ] = "128",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="most tokens of a response; those to random prompts have exactly so many")
    ] = 128,
    tokenizer: Annotated[
        Path | None, typer.Option(help="folder of the model's tokenizer; default: the served model's, if it is here")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="folder for JSON and plot; default: one under loadtests/", callback=bench.free_folder),
    ] = None,
) -> None:
    """Measure a server under load with vLLM's load test: rates, latencies, time to first token, GPU memory."""
    from penstock.cli.serving.loadtest import Load, run_loadtest
    from penstock.reports.loadtest import table

    asked = int(prompts) if prompts.isdecimal() else Path(prompts)
    found, folder = run_loadtest(url, Load(users, requests, asked, max_tokens), tokenizer, to)
    console.print(table(found))
    console.print(f"files: {short_path(folder)}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=LOOKING)
def ui(
    folder: Annotated[Path, typer.Argument(help="directory of the run folders")] = Path("runs"),
    tracker_port: Annotated[int, typer.Option(min=1, max=65535, help="port of the tracker's pages")] = 5000,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Prefect's pages")] = 4200,
) -> None:
    """Serve the tracker's and Prefect's pages of past runs until Ctrl-C (loopback only)."""
    from penstock.cli.pages import serve_pages

    serve_pages(folder, tracker_port, prefect_port, console)


if __name__ == "__main__":
    main()
