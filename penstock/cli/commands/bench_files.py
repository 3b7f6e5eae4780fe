"""The commands of `penstock bench` that measure nothing: they make models and prompts, or read results and draw them.

Heavy imports stay inside the commands, as in every command. Left out: the measurements (bench.py beside this file).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.places import free_file, free_folder
from penstock.cli.results import command
from penstock.cli.terminal import console, say

app = typer.Typer()


@app.command()
def page(
    result: Annotated[Path, typer.Argument(help="result file of 'bench algorithms'")] = Path(
        "benchmarks/results/algorithms/algorithms.json"
    ),
    target: Annotated[Path, typer.Argument(help="page with the tables")] = Path("docs/algorithms.md"),
    more_steps: Annotated[
        Path, typer.Option(help="a result with more algorithm.mini_batches, put beside it loss by loss")
    ] = Path("benchmarks/results/algorithms/algorithms_4_mini_batches.json"),
) -> None:
    """Write the tables of docs/algorithms.md: what each algorithm is and takes, and the accuracies of a result."""
    from penstock.base.files import write_text
    from penstock.benchmarks.accuracy.algorithms_page import read_page, rendered
    from penstock.benchmarks.reporting.result import read_result

    write_text(target, rendered(read_page(target), read_result(result), read_result(more_steps)))
    say(f"page: {target}")


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="result file of before")],
    new: Annotated[Path, typer.Argument(help="result file of after")],
    tolerance: Annotated[float, typer.Option(min=0, help="share by which a figure may be worse")] = 0.05,
) -> None:
    """Compare two results; exit code 1 where a figure got worse by more than the tolerance, or is gone."""
    from penstock.benchmarks.reporting.compare import compare as compare_results
    from penstock.benchmarks.reporting.compare import remarks
    from penstock.benchmarks.reporting.result import read_result
    from penstock.benchmarks.reporting.table import comparison_table

    before, after = read_result(old), read_result(new)
    changes = compare_results(before, after, tolerance)
    console.print(comparison_table(before, after, changes))
    for remark in remarks(before, after):
        say(remark)
    if any(change.verdict == "worse" for change in changes):
        raise SystemExit(1)


@app.command()
def peers(
    out: Annotated[Path | None, typer.Option(help="JSON file for --peers", callback=free_file)] = None,
    into: Annotated[Path | None, typer.Option(help="a result of the same work and machine, which they join")] = None,
    trl: Annotated[Path | None, typer.Option(help="output of the TRL run")] = None,
    verl: Annotated[Path | None, typer.Option(help="output of the verl run")] = None,
    trl_name: Annotated[str, typer.Option(help="what to call it, with its version")] = "trl",
    verl_name: Annotated[str, typer.Option(help="what to call it, with its version")] = "verl",
) -> None:
    """Read peers' figures from their logs: medians from the second step on."""
    import json

    from penstock.base.files import write_text
    from penstock.benchmarks.peers.logs import trl_figures, verl_figures
    from penstock.benchmarks.reporting.result import read_result, write_result

    if trl is None and verl is None:
        raise UserError("no log given", "name one with --trl or --verl")
    if out is None and into is None:
        raise UserError("nothing to write to", "name a file with --out, or a result with --into")
    result = read_result(into) if into else None
    found = {trl_name: trl_figures(trl)} if trl else {}
    found |= {verl_name: verl_figures(verl)} if verl else {}
    if out is not None:
        write_text(out, json.dumps(found, indent=2) + "\n")
    if into is not None and result is not None:
        joined = {"peers": result.peers | found, "peers_command": command()}
        write_result(into, result.model_copy(update=joined))
    for name, figures in found.items():
        say(f"{name}: " + ", ".join(f"{figure} {value:g}" for figure, value in figures.items()))


@app.command()
def chart(
    results: Annotated[Path, typer.Argument(help="folder with result files below")] = Path("benchmarks/results"),
    out: Annotated[
        Path | None, typer.Option(help="folder for the pictures; default: beside each result", callback=free_folder)
    ] = None,
) -> None:
    """Draw step times by stage beside the peers', and scaling, as SVG."""
    from penstock.benchmarks.reporting.chart import plot

    for path in plot(results, out):
        say(f"picture: {path}")


@app.command()
def model(
    size: Annotated[
        str, typer.Argument(help="billions of parameters in Qwen2.5's shape: 0.5, 1.5, 3 or 7; or mixture: of experts")
    ],
    folder: Annotated[Path, typer.Argument(help="folder for the model", callback=free_folder)],
    mean: Annotated[
        int | None, typer.Option(min=2, help="responses end after about so many tokens; default: hardly ever")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="so many; default: as many as the shape has")] = None,
    vocabulary: Annotated[int, typer.Option(min=512, help="size of the vocabulary")] = 151_936,
) -> None:
    """Make a model folder with random weights and a tokenizer of one token per byte."""
    from penstock.benchmarks.workload.make_model import MIXTURE, SHAPES, main

    if size not in (*SHAPES, MIXTURE):
        raise UserError(f"there is no shape of size '{size}'", f"choose one of {', '.join((*SHAPES, MIXTURE))}")
    main(size, folder, mean, layers, vocabulary)
    say(f"model: {folder}")


@app.command()
def prompts(
    file: Annotated[Path, typer.Argument(help="JSONL file for the prompts", callback=free_file)],
    overrides: Annotated[list[str] | None, typer.Argument(help="of --recipe: section.key=value, e.g. seed=1")] = None,
    letters: Annotated[
        int | None, typer.Option(min=1, help="length of a random prompt, as data.max_prompt_tokens says (256)")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="its problems (data.arithmetic), in the order of its training, with answers")
    ] = None,
    heldout: Annotated[
        Path | None, typer.Option(help="JSONL file for the held-out problems of --recipe", callback=free_file)
    ] = None,
) -> None:
    """Write the prompts that are measured, for the runs of benchmarks/peers: random letters, or a recipe's problems."""
    from penstock.benchmarks.workload.prompts import PROMPT_TOKENS, PROMPTS, as_rows, problems_of, write_rows
    from penstock.benchmarks.workload.prompts import prompts as random_letters
    from penstock.configs.loading.load import load_config

    if recipe is None and (overrides or heldout):
        raise UserError("overrides and --heldout are for a recipe's problems", "name the recipe with --recipe")
    if recipe is not None and letters is not None:
        raise UserError("--letters has no effect on a recipe's problems", "remove it")
    if recipe is None:
        write_rows(file, as_rows(random_letters(PROMPTS, letters or PROMPT_TOKENS)))
    else:
        problems = problems_of(load_config(recipe, overrides or []))
        write_rows(file, problems["train"])
        if heldout is not None:
            write_rows(heldout, problems["heldout"])
            say(f"held-out prompts: {heldout}")
    say(f"prompts: {file}")
