"""Commands that use a trained model: evaluate it, write it down, serve it, put load on its server.

Heavy imports stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.places import free_folder
from penstock.cli.terminal import console, short_path

RunsOption = Annotated[
    Path, typer.Option("--runs", help="directory of the run folders, for models:/...: the registry is in its store")
]


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_RUN... [RECIPE] [KEY=VALUE]...",
            help="Hugging Face folders, runs or checkpoints of runs; a YAML recipe, default that of the first run; "
            "changes of it, e.g. evaluate.samples=4",
        ),
    ],
    tasks: Annotated[
        str | None, typer.Option(help="tasks of lm-evaluation-harness, with commas: arc_easy,gsm8k")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with YAML files of tasks of your own")] = None,
    to: Annotated[
        Path | None, typer.Option(help="folder for tables and responses; default: one in evaluations, beside the runs")
    ] = None,
) -> None:
    """Evaluate models on the same held-out prompts or tasks: figures with intervals, and paired differences."""
    from penstock.cli.runs.evaluating import evaluated

    evaluated(models, tasks, include_path, to)


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="folder of a run, of one that has not ended its newest checkpoint counts; or models:/NAME@best"
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="folder to write; default: models/export of the run; a registered model needs one"),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="checkpoint to export, e.g. 000010; default: the final model, else the newest")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="most bytes of a weights file, e.g. 2GB; default: as they are, else 5GB")
    ] = None,
    folder: RunsOption = Path("runs"),
) -> None:
    """Write a model as a Hugging Face folder with a card, compare it with its source; its run's trackers are told."""
    from penstock.checks.registered import registered
    from penstock.tasks.export_run import export_run, export_version, run_to_export

    if (version := registered(str(run), folder)) is not None:
        if checkpoint is not None:
            raise UserError(f"{version} is one model, of no other checkpoint", "remove --checkpoint")
        done = export_version(version, to, max_shard_size)
    else:
        done = export_run(run_to_export(run), to, max_shard_size, checkpoint)
    lines = [*done.lines(), f"serve it: penstock serve {quote(short_path(done.folder))}"]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def serve(
    model: Annotated[
        Path,
        typer.Argument(help="Hugging Face folder, the folder of a run with a model, ORG/NAME, or models:/NAME@best"),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on the loopback interface")] = 8000,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.05, max=0.98, help="share of the GPU's memory for vLLM; default 0.8")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name that requests give the model; default: its folder's or run's")
    ] = None,
    folder: RunsOption = Path("runs"),
) -> None:
    """Serve a language model or a reward model with vLLM's server until Ctrl-C (OpenAI's API, loopback only)."""
    from penstock.checks.hub import snapshot
    from penstock.checks.registered import registered
    from penstock.cli.serving.serve import model_folder
    from penstock.cli.serving.serve import serve as serve_folder

    version = registered(str(model), folder)
    there = snapshot(str(model), "MODEL") if version is None else Path(str(version.folder))
    serve_folder(
        there or model_folder(model),
        port,
        gpu_memory,
        lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        name or (version.name if version is not None else str(model) if there else model.resolve().name),
    )


def promote(
    model: Annotated[
        str, typer.Argument(help="version of a registered model, e.g. models:/NAME/3 or models:/NAME@latest")
    ],
    folder: RunsOption = Path("runs"),
) -> None:
    """Let a version be 'best' if it is better on the same held-out prompts: exit code 0 then, else 1."""
    from penstock.cli.runs.promoting import promoted

    judgement = promoted(model, folder)
    console.print(str(judgement), highlight=False, markup=False, soft_wrap=True)
    if not judgement.better:
        raise typer.Exit(1)


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
        typer.Option(help="folder for JSON and plot; default: one under loadtests/", callback=free_folder),
    ] = None,
) -> None:
    """Measure a server under load with vLLM's load test: rates, latencies, time to first token, GPU memory."""
    from penstock.cli.serving.loadtest import Load, run_loadtest
    from penstock.reports.loadtest import table

    asked = int(prompts) if prompts.isdecimal() else Path(prompts)
    found, folder = run_loadtest(url, Load(users, requests, asked, max_tokens), tokenizer, to)
    console.print(table(found))
    console.print(f"files: {short_path(folder)}", highlight=False, soft_wrap=True)
