"""`penstock bench`: measurements with a table at the end and a JSON file; thin calls into the room benchmarks/.

Heavy imports stay inside the commands, as in every command. Left out: the commands that measure nothing, but make what
is measured or read results (bench_files.py beside this file).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands import bench_files
from penstock.cli.places import free_file
from penstock.cli.results import command, write_measured
from penstock.cli.terminal import console, say

if TYPE_CHECKING:
    from penstock.benchmarks.reporting.result import BenchResult
    from penstock.configs.schema import TrainConfig

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory; every command can write a JSON result.")

Recipe = Annotated[Path, typer.Argument(help="YAML recipe, e.g. configs/bench_grpo.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. model.path=models/random-1.5b")]
Out = Annotated[Path | None, typer.Option(help="JSON file for the result", callback=free_file)]
Skip = Annotated[int, typer.Option(min=0, help="cold measurements at the start that do not count")]
Peers = Annotated[Path | None, typer.Option(help="peers' figures, as 'penstock bench peers' writes them")]


class What(StrEnum):
    """What is scaled."""

    step = "step"
    update = "update"


@app.command()
def step(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    peers: Peers = None,
    skip: Skip = 2,
    run: Annotated[Path | None, typer.Option(help="keep the run folder here; default: a temporary one")] = None,
) -> None:
    """Whole iterations of `penstock train`: seconds by stage, tokens per second, memory."""
    from penstock.benchmarks.reporting.result import read_peers
    from penstock.benchmarks.step import measure

    known = read_peers(peers) if peers else {}
    result = measure(recipe, overrides or [], command(), skip, run)
    _finish(result.model_copy(update={"peers": known}), out)


@app.command()
def update(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="fixed: the recipe's longest prompt and response; lognormal:MEAN:LONGEST: a long tail of responses, "
            "of so many tokens on average before the longest are cut, e.g. lognormal:600:4096; branched:PERCENT: fixed "
            "ones, so much of all responses to a prompt the same, as in branches of a conversation"
        ),
    ] = "fixed",
    critic: Annotated[bool, typer.Option("--critic", help="update the critic as well (ppo)")] = False,
    steps: Annotated[int, typer.Option(min=1, help="updates")] = 6,
    skip: Skip = 2,
) -> None:
    """The actor's update alone, on made-up experience: seconds, MFU, memory, loss of every step."""
    from penstock.benchmarks.update import measure
    from penstock.benchmarks.workload.experience import lengths_named

    with tempfile.TemporaryDirectory() as folder:
        config = _load(recipe, overrides, folder)
        made_up = lengths_named(lengths, config)
        result = measure(config, made_up, command(), steps=steps, skip=skip, critic=critic)
    _finish(result, out, ("step", "time/update_actor_s", "actor/loss", "actor/grad_norm", "actor/entropy"))


@app.command()
def native(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    lengths: Annotated[
        str, typer.Option(help="fixed: the recipe's longest prompt and response; lognormal:MEAN:LONGEST: a long tail")
    ] = "fixed",
    rows: Annotated[
        int | None, typer.Option(min=1, help="rows of a plain micro-batch; default: what the recipe's has room for")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="updates")] = 6,
    skip: Skip = 2,
) -> None:
    """The actor's update beside the same in plain PyTorch FSDP and in plain DeepSpeed: samples per second, memory."""
    from penstock.benchmarks.native.measuring import measure
    from penstock.benchmarks.workload.experience import lengths_named

    with tempfile.TemporaryDirectory() as folder:
        config = _load(recipe, overrides, folder)
        result = measure(config, lengths_named(lengths, config), command(), steps=steps, skip=skip, rows=rows)
    _finish(result, out, ("library", "step", "loss", "grad_norm"))


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    rounds: Annotated[int, typer.Option(min=1, help="iterations' worth of responses")] = 5,
    skip: Skip = 2,
    beside_vllm: Annotated[
        bool, typer.Option("--beside-vllm", help="then measure vLLM by itself, on one GPU, as a peer")
    ] = False,
) -> None:
    """The rollout alone: tokens per second."""
    from penstock.benchmarks.peers import vllm_alone
    from penstock.benchmarks.rollout import measure

    with tempfile.TemporaryDirectory() as folder:
        config = _load(recipe, overrides, folder)
        if beside_vllm:
            vllm_alone.model_folder(config)
        result, asked = measure(config, command(), rounds=rounds, skip=skip)
        _finish(result, out)
        if beside_vllm:  # after the result is kept: it may fail
            _finish(result.model_copy(update={"peers": vllm_alone.measure(config, asked, skip)}), out)


@app.command()
def reshard(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    strategies: Annotated[
        str, typer.Option(help="shared,local,gather,broadcast or some of them, each placed for this machine")
    ] = "",
    update: Annotated[bool, typer.Option(help="an optimizer step before each reshard")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="reshards")] = 8,
    skip: Skip = 2,
) -> None:
    """A reshard and the pause of generation around it: seconds and bytes, per strategy on request."""
    from penstock.benchmarks.reshard import Plan, measure, measure_strategies

    names, plan = [name.strip() for name in strategies.split(",") if name.strip()], Plan(rounds, skip, update)
    with tempfile.TemporaryDirectory() as folder:
        if names:
            result = measure_strategies(recipe, overrides or [], command(), Path(folder), names, plan)
        else:
            result = measure(_load(recipe, overrides, folder), command(), plan)
    _finish(result, out)
    for row in result.details:
        if "left_out" in row:
            say(f"left out: {row['left_out']}")


@app.command()
def checkpoint(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    folder: Annotated[Path, typer.Option(help="where files are written, and deleted; its disk is measured")] = Path(
        "runs"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="how often the state is saved in each way")] = 6,
    skip: Skip = 2,
) -> None:
    """What a snapshot and a checkpoint hold up, beside PyTorch's and DeepSpeed's ways of saving the same state."""
    from penstock.benchmarks.checkpoint import measure

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as prompts, tempfile.TemporaryDirectory(dir=folder) as files:
        result = measure(_load(recipe, overrides, prompts), command(), Path(files), rounds=rounds, skip=skip)
    _finish(result, out)


@app.command()
def recovery(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    run: Annotated[Path | None, typer.Option(help="keep the run folder here; default: a temporary one")] = None,
) -> None:
    """How long a training stands still when one of its ranks is killed in an update."""
    from penstock.benchmarks.recovery import measure

    _finish(measure(recipe, overrides or [], command(), run), out)


@app.command()
def scheduler(
    sequences: Annotated[int, typer.Option(min=1, help="decoded at a time")] = 512,
    samples: Annotated[int, typer.Option(min=1, help="responses to each prompt")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 256,
    response: Annotated[int, typer.Option(min=1, help="tokens of a response")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="generations")] = 3,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="of the tokens, as rollout.carry asks for")] = False,
    out: Out = None,
) -> None:
    """What the processor needs for a decoding step of the rollout engine, without any model."""
    from penstock.benchmarks.scheduler import Work, measure

    result = measure(Work(sequences, samples, prompt, response, logprobs), command(), rounds)
    _finish(result, out, ("scheduler", "step_s", "schedule_s", "update_from_output_s", "slow_step_s"))


@app.command()
def speculation(
    model: Annotated[Path, typer.Argument(help="model folder, e.g. models/random-1.5b")],
    rows: Annotated[
        list[int], typer.Option(min=1, help="sequences for which is drafted; several times for several numbers")
    ] = [1, 4, 16, 64],  # noqa: B006 - Typer copies it
    batch: Annotated[int, typer.Option(min=1, help="sequences of a full batch, for which is not drafted")] = 512,
    drafts: Annotated[int, typer.Option(min=1, help="tokens for each sequence and step")] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 64,
    response: Annotated[int, typer.Option(min=4, help="tokens of a response")] = 256,
    out: Out = None,
) -> None:
    """What a decoding step takes with few sequences and with drafts, and from how many accepted ones these pay."""
    from penstock.benchmarks.speculation.measuring import measure

    sizes = {"batch": batch, "drafts": drafts, "prompt": prompt, "response": response}
    result = measure(model, command(), rows=rows, **sizes)
    _finish(result, out, ("way", "text", "rows", "step_s", "tokens_per_s", "drafted", "accepted", "same_tokens"))


@app.command()
def drafts(
    experience: Annotated[Path, typer.Argument(help="of a run, e.g. runs/NAME/experience/000001.parquet")],
    left: Annotated[int, typer.Option(min=1, help="responses that are left when drafting begins")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="drafts for each response and step")] = 4,
    out: Out = None,
) -> None:
    """How many drafted tokens the last responses of a run's rollout would have had accepted; no engine."""
    from penstock.benchmarks.speculation.tail import measure

    _finish(measure(experience, command(), left=left, drafts=tokens), out)


@app.command()
def replies(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    engines: Annotated[
        list[int], typer.Option(min=1, help="a number of engines; several times for several numbers")
    ] = [1, 2, 4, 8],  # noqa: B006 - Typer copies it
    rounds: Annotated[int, typer.Option(min=1, help="iterations' worth of responses")] = 6,
    skip: Skip = 2,
) -> None:
    """What the flow itself needs for the replies of ever more engines; none of them has a model."""
    from penstock.benchmarks.replies import measure

    with tempfile.TemporaryDirectory() as folder:
        result = measure(_load(recipe, overrides, folder), command(), counts=engines, rounds=rounds, skip=skip)
    _finish(result, out, ("engines", "responses", "flow_s", "rollout_s", "reward_s", "advantage_s"))


@app.command()
def waiting(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    skip: Skip = 1,
    synchronous: Annotated[
        int | None, typer.Option(min=2, help="iterations of the training that waits; default: the recipe's")
    ] = None,
    lognormal: Annotated[
        bool, typer.Option("--lognormal", help="end responses after log-normal numbers of tokens, 600 on the mean")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="a result of this benchmark whose synchronous training is not repeated")
    ] = None,
) -> None:
    """What is gained by not waiting for the longest responses, beside waiting for all.

    The training that waits comes first. Once it has ended it is kept beside the file of --out, as NAME.half.json, until
    the other has ended, too: the same command begun again goes on with the other. --against takes it as well.
    """
    from penstock.benchmarks.reporting.halves import forget_half
    from penstock.benchmarks.reporting.result import read_result
    from penstock.benchmarks.waiting import measure

    result = measure(
        recipe,
        overrides or [],
        command(),
        skip=skip,
        synchronous=synchronous,
        lognormal=lognormal,
        against=None if against is None else read_result(against),
        out=out,
        say=say,
    )
    _finish(result, out, ("mode", "iteration", "time/iteration_s", "time/rollout_s", "rollout/deferred"))
    forget_half(out)


@app.command()
def gateway(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    agent: Annotated[
        str, typer.Option(help="module:name of the class that asks the policy, by the rules of the recipe's")
    ] = "penstock.environments.calculator:CalculatorAgent",
    skip: Skip = 2,
) -> None:
    """Rollouts whose episodes ask the policy over HTTP, beside the same ones inside the loop.

    These come first. Once they have ended they are kept beside the file of --out, as NAME.half.json, until the others
    have ended, too: the same command begun again goes on with the others.
    """
    from penstock.benchmarks.gateway.measuring import measure
    from penstock.benchmarks.reporting.halves import forget_half

    result = measure(recipe, overrides or [], command(), agent=agent, skip=skip, out=out, say=say)
    _finish(result, out, ("mode", "iteration", "time/rollout_s", "rollout/tokens_per_s", "rollout/engine_wait_share"))
    forget_half(out)
    say(f"over HTTP {result.figures['share_of_inside']:.1%} of the tokens per second inside")


@app.command()
def nccl(
    out: Out = None,
    largest: Annotated[int, typer.Option(min=1, help="largest buffer, MiB")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per size")] = 20,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="GPUs, or CPU ranks; default: all GPUs, or two ranks")
    ] = None,
) -> None:
    """Bandwidth of all-gather, broadcast and all-reduce by buffer size, against NVLink's rate."""
    from penstock.benchmarks.nccl import measure

    result = measure(command(), largest_mib=largest, rounds=rounds, ranks=ranks)
    _finish(result, out, ("collective", "bytes", "seconds", "bus_gb_per_s"))
    say(result.settings["verdict"])


@app.command()
def broadcast(
    out: Out = None,
    receivers: Annotated[
        list[int] | None, typer.Option(min=1, help="rollout ranks; 1, 2, 4 and 8 unless given")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="a bucket, MiB")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="measurements each")] = 10,
) -> None:
    """What a bucket of weights costs by the number of receivers: seconds, and on a CPU copies that the sender sends."""
    from penstock.benchmarks.broadcast import measure

    result = measure(command(), receivers=receivers or [1, 2, 4, 8], size_mib=size, rounds=rounds)
    _finish(result, out, tuple(result.details[0]))


@app.command()
def fan_in(
    out: Out = None,
    ranks: Annotated[
        list[int], typer.Option(min=1, help="a number of ranks, eight a host; several times for several numbers")
    ] = [1, 8, 64],  # noqa: B006 - Typer copies it
    rounds: Annotated[int, typer.Option(min=1, help="commands per number")] = 50,
) -> None:
    """What a command to ever more ranks and hosts costs the flow, and watching them; no models."""
    from penstock.benchmarks.fan_in import measure

    result = measure(command(), counts=ranks, rounds=rounds)
    _finish(result, out, ("ranks", "hosts", "command_ms", "command_cpu_ms", "watch_cores", "start_s"))


@app.command()
def sizes(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    model: Annotated[
        str, typer.Option(help="folder with a config.json, weights or not, or qwen2.5-32b or llama-3.1-70b")
    ] = "llama-3.1-70b",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the machine")] = 8,
) -> None:
    """What a recipe needs of GPUs of 80 and 141 GB and of their host, with a model that need not be there."""
    from penstock.benchmarks.sizes.estimate import measure
    from penstock.benchmarks.sizes.shapes import shape_named

    with tempfile.TemporaryDirectory() as folder:
        config = _load(recipe, overrides, folder)
    result = measure(config, shape_named(model), gpus, command())
    _finish(result, out, ("card", "phase", "GiB", "fits", "parts"))


@app.command()
def families(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="folders of models, or names of families, of which a tiny one is made; default: all families"
        ),
    ] = None,
    out: Out = None,
    page: Annotated[Path | None, typer.Option(help="page whose table of families is written anew")] = None,
) -> None:
    """Families of models: that what is trained is what vLLM serves, by log-probs beside the Transformers library's.

    A result file that is there keeps its rows of models that are not named. It is written after each model.
    """
    from penstock.base.files import write_text
    from penstock.benchmarks.families.measuring import COLUMNS, measure, with_rows_of
    from penstock.benchmarks.families.page import read_page, rendered
    from penstock.benchmarks.reporting.result import read_result
    from penstock.benchmarks.workload.families import FAMILIES

    text = None if page is None else read_page(page)
    before = None if out is None or not out.is_file() else read_result(out)

    def with_earlier(so_far: BenchResult) -> BenchResult:
        return so_far if before is None else with_rows_of(before, so_far)

    def keep(so_far: BenchResult) -> None:
        if out is not None:
            write_measured(out, with_earlier(so_far))

    result = measure(command(), models or list(FAMILIES), keep)
    if models:
        result = with_earlier(result)
    _finish(result, out, COLUMNS)
    if page is not None and text is not None:
        write_text(page, rendered(text, result))


@app.command()
def scaling(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    gpus: Annotated[str | None, typer.Option(help="e.g. 1,2,4,8; default: 1, 2, 4, ... up to all")] = None,
    what: Annotated[What, typer.Option(help="what every count runs")] = What.step,
    skip: Skip = 2,
    one: Annotated[Path | None, typer.Option(help="a result on one GPU, which is not measured again then")] = None,
) -> None:
    """The same work per GPU on ever more GPUs; rollout.prompts counts for one GPU."""
    from penstock.benchmarks.scaling import COLUMNS, measure, parse_counts

    counts = parse_counts(gpus)
    result = measure(recipe, overrides or [], command(), counts=counts, what=what.value, skip=skip, one=one)
    _finish(result, out, ("gpus", *COLUMNS[what.value], "scaling_efficiency"))


@app.command()
def algorithms(
    overrides: Overrides = None,
    names: Annotated[str, typer.Option(help="e.g. grpo,ppo; default: all")] = "",
    seeds: Annotated[str, typer.Option(help="one training of each algorithm per seed")] = "0,1,2",
    iterations: Annotated[int | None, typer.Option(min=1, help="default: the recipe's")] = None,
    recipe: Annotated[Path, typer.Option(help="YAML recipe")] = Path("configs/careless.yaml"),
    parallel: Annotated[int, typer.Option(min=1, help="trainings at a time; they share cores and GPUs")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the result; what it holds is not run again", callback=free_file)
    ] = None,
) -> None:
    """Held-out accuracy of every algorithm after a short training each."""
    from penstock.algorithms.registry import ALGORITHMS
    from penstock.benchmarks.accuracy.algorithms import Plan, measure, parse_seeds

    own = (*(overrides or []), *([f"iterations={iterations}"] if iterations else []))
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) or tuple(ALGORITHMS)
    result = measure(Plan(recipe, chosen, parse_seeds(seeds), parallel, own), command(), out, say)
    _finish(result, out, ("name", "seed", "accuracy_before", "accuracy_after", "improved", "seconds"))


@app.command()
def learning(
    recipe: Recipe,
    overrides: Overrides = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="a setting of the mode, e.g. 'rollout.tail={extra: 0.25}'; several times")
    ] = None,
    seeds: Annotated[str, typer.Option(help="two trainings per seed")] = "0,1,2,3,4",
    parallel: Annotated[int, typer.Option(min=1, help="trainings at a time; they share cores and GPUs")] = 1,
    out: Out = None,
) -> None:
    """What a mode of working learns from as many samples, beside synchronous training: held-out accuracy by seeds."""
    from penstock.benchmarks.accuracy.algorithms import parse_seeds
    from penstock.benchmarks.accuracy.modes import Comparison, measure

    asked = Comparison(recipe, tuple(mode or ()), parse_seeds(seeds), parallel, tuple(overrides or ()))
    result = measure(asked, command(), say)
    _finish(result, out, ("seed", "name", "accuracy_before", "accuracy_after", "iterations", "logprob_gap"))


app.add_typer(bench_files.app)  # after those above, as 'penstock bench --help' lists them


def _load(recipe: Path, overrides: list[str] | None, folder: str) -> TrainConfig:
    from penstock.benchmarks.session import load_recipe

    return load_recipe(recipe, overrides or [], Path(folder))


def _finish(result: BenchResult, out: Path | None, columns: Sequence[str] = ()) -> None:
    """Print the table (and the details) and write the file."""
    from penstock.benchmarks.reporting.table import details_table, result_table

    if columns:
        console.print(details_table(result, columns))
    console.print(result_table(result))
    if out is not None:
        write_measured(out, result)
        say(f"result: {out}")
