"""Commands that use a trained model: write it down, serve it, put load on its server.

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
    from penstock.cli.runs.export_run import export_run
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
