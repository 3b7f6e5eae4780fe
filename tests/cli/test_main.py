"""The command line: a user's mistake is one message with a remedy and exit code 2, and nothing is left behind.

Every mistake here is made in a recipe that is otherwise right, and that the last line of defence, the start of the
flow, accepts: the control of all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic_core import PydanticSerializationError

from penstock.checks import memory
from penstock.checks.model import attention, mixtures, served
from penstock.checks.model import folder as folders
from penstock.cli import main as cli
from penstock.cli import running, terminal
from penstock.cli.commands import training
from penstock.cli.prefect import server
from penstock.configs.loading.load import load_config
from penstock.engines.groups.group import RankLost
from penstock.engines.sizing.memory import GIB
from penstock.state.digests import signed
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder
from tests.own_code.model import write_own_model
from tests.state.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
model: {tiny: {max_positions: 64}}
data: {train: train.jsonl, heldout: heldout.jsonl, prompt: question, max_prompt_tokens: 32}
reward: {function: "penstock.rewards.builtin:exact_match"}
rollout: {prompts: 8, max_response_tokens: 16, max_sequences: 16}
actor: {micro_batch_tokens: 1024}
"""
ROW = json.dumps({"question": "1+1=", "answer": "2"}) + "\n"


class Started(Exception):
    """The command got as far as starting the flow."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe that is right; no flow is ever started."""

    def start(config: Any, folder: Path, **arguments: Any) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        "penstock.cli.libraries.quiet_libraries", lambda: None
    )  # it sets variables of the whole process
    monkeypatch.setattr(training, "_run_flow", start)
    for module in (memory, attention, folders, mixtures, served):
        monkeypatch.setattr(module, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)
    for name, text in (("recipe.yaml", RECIPE), ("train.jsonl", ROW * 3), ("heldout.jsonl", ROW)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command line in this process; return what it printed."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        cli.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(penstock: Callable[..., str], capsys: pytest.CaptureFixture[str], here: Path) -> Callable[..., str]:
    """Run a command that must be refused and leave no trace; return the message."""

    def run(*arguments: str) -> str:
        before = tree(here)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            penstock(*arguments)
        assert ended.value.code == 2
        assert tree(here) == before
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert "Traceback" not in said.err
        return said.err.removeprefix("error: ")

    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every file and folder with its content."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_a_right_recipe_starts(penstock: Callable[..., str]) -> None:
    """The control of every refusal below, in a folder of its own if none is named."""
    with pytest.raises(Started):
        penstock("train", "recipe.yaml", "--run", "run")
    with pytest.raises(Started):
        penstock("train", "recipe.yaml")
    assert [path.name.split("-")[0] for path in Path("runs").iterdir()] == ["train"]


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        ([], "no recipe given", "penstock train configs/quickstart.yaml"),
        (["recipe.yml"], "recipe.yml does not exist", "give the path of a YAML file"),
        (["recipe.yaml", "rollout.sampels=4"], "rollout.sampels", "did you mean 'rollout.samples'?"),
        (["recipe.yaml", "rollout.samples"], "'rollout.samples' is not section.key=value", "rollout.samples=16"),
        (["recipe.yaml", "rollout.samples=many"], "rollout.samples: must be a whole number", "given: 'many'"),
        (
            ["recipe.yaml", "algorithm.settings.gae_lambda=0.9"],
            "algorithm.settings.gae_lambda: has no effect with advantage 'grpo'",
            "remove it",
        ),
        (
            ["recipe.yaml", "algorithm.mini_batches=3"],
            "'rollout.samples' (64) must be a multiple of 'algorithm.mini_batches' (3)",
            "penstock keys",
        ),
        (["recipe.yaml", "model.tiny=null"], "'model.path' is not set", "add model.path=FOLDER"),
        (["recipe.yaml", "model.tiny.heads=6"], "heads of 16 numbers; on a CPU, vLLM computes 32", "model.tiny.heads"),
        (["recipe.yaml", "model.tiny.heads=6", "--dry-run"], "heads of 16 numbers", "change model.tiny.hidden_size"),
        (["recipe.yaml", "model={path: absent, tiny: null}"], "there is no folder absent", "set model.path"),
        (["recipe.yaml", "model={path: recipe.yaml, tiny: null}"], "recipe.yaml is a file", "set model.path"),
        (["recipe.yaml", "model={path: bare, tiny: null}"], "has no *.safetensors weights", "save_pretrained()"),
        (
            ["recipe.yaml", "reward.function=penstock.rewards.builtin:exact_mach"],
            "has no 'exact_mach'",
            "'exact_match'",
        ),
        (
            ["recipe.yaml", "reward.function=no_module:f"],
            "module 'no_module' does not import",
            "Put no_module.py under",
        ),
        (["recipe.yaml", "reward.function=null"], "no reward", "add reward.function=module:function"),
        (
            ["recipe.yaml", "reward.settings.sufix=."],
            "which 'penstock.rewards.builtin:exact_match' does not take",
            "'suffix'",
        ),
        (["recipe.yaml", "data.prompt=qestion"], "has no column 'qestion'", "did you mean 'question'?"),
        (["recipe.yaml", "data.train=no.jsonl"], "no.jsonl does not exist", "check the path"),
        (["recipe.yaml", "data.heldout=null"], "'data.heldout' is not set", "add data.heldout=FILE"),
        (["recipe.yaml", "data.heldout=null", "evaluate.every=0"], "is not set", "evaluated before and after"),
        (["recipe.yaml", "sft.steps=1"], "the 'sft' section needs 'data.sft'", "sft=null"),
        (["recipe.yaml", "groups.main={gpus: [0], roles: [actor, rollout]}"], "names GPU 0", "remove 'gpus'"),
        (["recipe.yaml", "rollout.kv_cache_gib=64"], "largest part: KV cache, 64.0 GiB", "lower rollout.kv_cache_gib"),
        (
            ["recipe.yaml", "actor.micro_batch_tokens=9000000"],
            "largest part: backward pass",
            "actor.micro_batch_tokens",
        ),
        (["recipe.yaml", "rollout.max_response_tokens=64"], "is 96, the model has 64 positions", "lower one"),
        (["recipe.yaml", "--dry-rum"], "No such option", "--dry-run"),
        (["recipe.yaml", "--iterations", "3"], "No such option", "without dashes: iterations=VALUE"),
        (["recipe.yaml", "--rollout.samples=3"], "No such option", "without dashes: rollout.samples=VALUE"),
        (["."], ". is a folder", "a YAML file"),
    ],
)
def test_a_wrong_recipe_or_override_is_refused(
    here: Path, refusal: Callable[..., str], arguments: list[str], problem: str, remedy: str
) -> None:
    """It says what is wrong and what to do, before a run folder exists."""
    (here / "bare").mkdir()
    (here / "bare" / "config.json").write_text("{}")
    said = refusal("train", *arguments, "--run", "run")
    assert problem in said
    assert remedy in said


def test_a_model_that_needs_code_of_its_own_is_refused(
    here: Path, refusal: Callable[..., str], penstock: Callable[..., str]
) -> None:
    """With the key that trusts it. Control: with the key it starts."""
    write_own_model(here / "model")
    command = ("train", "recipe.yaml", "model={path: model, tiny: null}", "--run", "run")
    said = refusal(*command)
    assert "which the Transformers library has no class for" in said
    assert "model.trust_remote_code=true" in said
    with pytest.raises(Started):
        penstock(*command, "model.trust_remote_code=true")


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ("{}", None, "config.json has no 'num_attention_heads'"),
        ("{", b"", "is damaged"),
        (None, b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (None, b"", "is damaged"),
    ],
)
def test_a_damaged_model_folder_is_refused(
    here: Path,
    refusal: Callable[..., str],
    penstock: Callable[..., str],
    config: str | None,
    weights: bytes | None,
    message: str,
) -> None:
    """Also one with pointers in place of weights, as a clone leaves them. Control: a whole one starts."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 8,
        "vocab_size": 64,
    }
    header = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    model = here / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text(json.dumps(sizes))
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    command = ("train", "recipe.yaml", "model={path: model, tiny: null}", "--run", "run")
    with pytest.raises(Started):
        penstock(*command)
    (model / "config.json").write_text(json.dumps(sizes) if config is None else config)
    if weights is not None:
        (model / "model.safetensors").write_bytes(weights)
    assert message in refusal(*command[:-1], "other")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROW + '{"question": "1+2=", "answer": \n', "train.jsonl, line 2 is not JSON"),
        (ROW + '{"question": "1+2="}\n', "train.jsonl, line 2: column 'answer' is missing"),
        (ROW + '{"question": "", "answer": "3"}\n', "train.jsonl, line 2: 'question' is empty"),
        ('{"question": "1+1=", "answer": "2", "prompt_id": 1}\n', "a column 'prompt_id', a name Penstock uses"),
        ("", "train.jsonl has no rows"),
    ],
)
def test_wrong_data_is_named_by_its_line(here: Path, refusal: Callable[..., str], rows: str, message: str) -> None:
    """Before any engine starts, also for rows that only the tokenizer would meet."""
    (here / "train.jsonl").write_text(rows, encoding="utf-8")
    assert message in refusal("train", "recipe.yaml", "--run", "run")


def test_pairs_for_the_warm_up_are_read_where_the_recipe_says(
    here: Path, refusal: Callable[..., str], penstock: Callable[..., str]
) -> None:
    """File and column. Control: with both right the training starts."""
    (here / "pairs.jsonl").write_text(json.dumps({"question": "1+1=", "solution": "2"}) + "\n", encoding="utf-8")
    command = ("train", "recipe.yaml", "sft={steps: 1}")
    assert "needs 'data.sft'" in refusal(*command, "data.response=solution")
    assert "absent.jsonl does not exist" in refusal(*command, "data.response=solution", "data.sft=absent.jsonl")
    assert "needs 'data.response'" in refusal(*command, "data.sft=pairs.jsonl")
    assert "no column 'answer'" in refusal(*command, "data.sft=pairs.jsonl", "data.response=answer")
    with pytest.raises(Started):
        penstock(*command, "data.sft=pairs.jsonl", "data.response=solution")


def test_held_out_prompts_are_read_where_the_recipe_says(here: Path, refusal: Callable[..., str]) -> None:
    """Their columns are those of the training prompts. The control are all commands that start."""
    assert "absent.jsonl does not exist" in refusal("train", "recipe.yaml", "data.heldout=absent.jsonl")
    (here / "other.jsonl").write_text('{"question": "1+1="}\n', encoding="utf-8")
    assert "data.heldout lacks the column 'answer'" in refusal("train", "recipe.yaml", "data.heldout=other.jsonl")
    assert "absent.jsonl does not exist" in refusal("train", "recipe.yaml", "data.train=absent.jsonl")


def test_a_reward_function_that_asks_for_an_unknown_column_is_refused(
    here: Path, refusal: Callable[..., str], penstock: Callable[..., str]
) -> None:
    """Functions are found in the working directory; the control is the same function on a column that exists."""
    source = "def by_level(response, level): return 1\ndef by_answer(response, answer): return 1\n"
    (here / "my_rewards.py").write_text(source, encoding="utf-8")
    said = refusal("train", "recipe.yaml", "reward.function=my_rewards:by_level")
    assert "asks for 'level'" in said
    assert "Available: " in said
    with pytest.raises(Started):
        penstock("train", "recipe.yaml", "reward.function=my_rewards:by_answer")


def test_folders_that_hold_something_are_refused(here: Path, refusal: Callable[..., str]) -> None:
    """A run is never written over, and nothing is resumed that no run began."""
    for name, file in (("taken", "config.yaml"), ("full", "notes.txt")):
        (here / name).mkdir()
        (here / name / file).write_text(RECIPE if name == "taken" else "mine")
    said = refusal("train", "recipe.yaml", "--run", "taken")  # each way out is one that works
    assert "name another folder" in said and "--resume" not in said
    assert "full is not empty" in refusal("train", "recipe.yaml", "--run", "full")
    assert "recipe.yaml is a file" in refusal("train", "recipe.yaml", "--run", "recipe.yaml")
    assert "full holds no run" in refusal("train", "--resume", "full")
    assert "no manifest.json to resume from" in refusal("train", "--resume", "taken")
    assert "stopped before it wrote there, give its command again" in refusal("train", "--resume", "full")
    (here / "begun").mkdir()
    for file in ("config.yaml", "manifest.json"):
        (here / "begun" / file).write_text("{}")
    assert "--resume begun" in refusal("train", "recipe.yaml", "--run", "begun")
    assert "taken has no model to export" in refusal("export", "taken")
    assert "remove the recipe" in refusal("train", "recipe.yaml", "--resume", "taken")
    assert "full holds no run" in refusal("set", "full", "rollout.temperature=0.5")


@pytest.mark.parametrize("place", ["folder=/proc/runs", "folder=recipe.yaml", "--run=recipe.yaml/run"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_place_where_nothing_can_be_made_is_refused(refusal: Callable[..., str], place: str, dry: bool) -> None:
    """Also by a dry run. Control: all the runs that start."""
    said = refusal("train", "recipe.yaml", place, *(["--dry-run"] if dry else []))
    assert said.startswith(f"the run folder {place.partition('=')[2]} cannot be made: ")
    assert "name another with folder=" in said
    url = "http://127.0.0.1:9"  # where nobody listens, which is noticed later
    assert refusal("loadtest", url, "--to", "/proc/x").startswith("the folder /proc/x cannot be made: ")


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said_before_a_run_has_a_folder(refusal: Callable[..., str], here: Path) -> None:
    """By what starts a flow and by what speaks to a running one. Controls: runs without a server; a dry run."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        said = refusal("train", "recipe.yaml")
        assert said.startswith("no Prefect server answers at http://127.0.0.1:9/api (PREFECT_API_URL): ")
        assert "penstock server" in said
        (here / "run").mkdir()
        begun(RunFolder(here / "run"), RECIPE)
        assert "no Prefect server answers" in refusal("train", "--resume", "run")
        assert "no Prefect server answers" in refusal("set", "run", "rollout.temperature=0.5")
        assert "no Prefect server answers" in refusal("set", "run", "--clear")


def test_a_server_is_asked_once_before_a_flow(
    penstock: Callable[..., str], monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """A new run and a resume: what starts a temporary server leaves a configured one alone. Control: a dry run."""
    penstock("train", "recipe.yaml", "--dry-run")
    assert asked == []

    def start(config: Any, folder: Path, **arguments: Any) -> None:
        begun(RunFolder(folder), RECIPE)
        with running.ending_in_words("train", folder):
            raise Started

    monkeypatch.setattr(training, "_run_flow", start)
    for number, arguments in enumerate((["recipe.yaml", "--run", "run"], ["--resume", "run"]), start=1):
        with pytest.raises(Started):
            penstock("train", *arguments)
        assert asked == ["/api/health"] * number


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """Configure a Prefect server that answers, and give the paths that it is asked for."""
    paths: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{listening.server_port}/api"}):
            yield paths
        listening.shutdown()
    signal.signal(signal.SIGTERM, before)


def test_resume_continues_with_the_configuration_of_the_run(
    here: Path, penstock: Callable[..., str], refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow gets the folder and what is in it; `--dry-run` and a checkpoint that is not there start nothing."""
    run = RunFolder(here / "run")
    run.path.mkdir()
    begun(run, RECIPE.replace("prompts: 8", "prompts: 12"), iteration=3)
    started: list[Any] = []
    monkeypatch.setattr(training, "_run_flow", lambda config, folder, **arguments: started.append((config, arguments)))
    assert "prompts: 12" in penstock("train", "--resume", "run", "--dry-run")
    assert started == []
    penstock("train", "--resume", "run")
    ((config, arguments),) = started
    assert config.rollout.prompts == 12
    assert arguments == {"resume": "run", "from_checkpoint": None, "changes": []}
    assert "has no checkpoint 2" in refusal("train", "--resume", "run", "--from", "2")
    assert len(started) == 1
    write_checkpoint(run, Manifest(Progress(iteration=2), checkpoint="000002"))
    penstock("train", "--resume", "run", "--from", "2")
    assert started[1][1]["from_checkpoint"] == "2"


def test_a_resume_may_change_how_long_and_how_but_not_what_is_trained(
    here: Path, penstock: Callable[..., str], refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may is given to the flow, which writes it once the run is its own: the command changes no file."""
    run = RunFolder(here / "run")
    run.path.mkdir()
    begun(run, RECIPE + "iterations: 4\n", iteration=3)
    before = tree(here)
    assert "iterations: 6" in penstock("train", "--resume", "run", "iterations=6", "--dry-run")
    assert "keys that can: iterations" in refusal("train", "--resume", "run", "rollout.samples=4")
    assert "has done 3 already" in refusal("train", "--resume", "run", "iterations=2")
    assert "is not section.key=value" in refusal("train", "--resume", "run", "iterations=6", "more")
    started: list[Any] = []
    monkeypatch.setattr(training, "_run_flow", lambda config, *_, **arguments: started.append((config, arguments)))
    penstock("train", "--resume", "run", "iterations=6", "reward.timeout_s=20")
    ((changed, arguments),) = started
    assert arguments["changes"] == ["iterations=6", "reward.timeout_s=20"]
    assert (changed.iterations, changed.reward.timeout_s) == (6, 20.0)
    assert changed.rollout == load_config(here / "recipe.yaml").rollout
    assert tree(here) == before


def test_a_complete_run_is_extended(here: Path, penstock: Callable[..., str], refusal: Callable[..., str]) -> None:
    """Controls: with as many iterations as are done it stays complete; without a checkpoint it cannot go on."""
    run = completed(here / "run")
    write_manifest(run, Manifest(Progress(iteration=3), checkpoint="000003"))
    with pytest.raises(Started):
        penstock("train", "--resume", "run", "iterations=5")
    assert "is complete" in penstock("train", "--resume", "run", "iterations=3")
    write_manifest(run, Manifest(Progress(iteration=3)))
    assert "no checkpoint to go on from" in refusal("train", "--resume", "run", "iterations=8")


WRAPPED = PydanticSerializationError("Error calling function `_ser_model`: KeyboardInterrupt: ")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, typer.Abort, WRAPPED], ids=["plain", "typer", "pydantic"])
def test_ctrl_c_outside_of_a_flow_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    penstock: Callable[..., str],
    interruption: type[BaseException] | BaseException,
) -> None:
    """While Prefect's server starts, say: 130 and a word, whatever libraries make of it. Control: what ends well is 0.

    Pydantic makes an error of its own of one that comes while it writes settings; another such error is a defect.
    """
    penstock("train", "recipe.yaml", "--dry-run")

    def interrupted(*_: object, **__: object) -> None:
        raise interruption

    monkeypatch.setattr(training, "_run_flow", interrupted)
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "recipe.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert "stopped" in capsys.readouterr().err
    other = PydanticSerializationError("Error calling function `_ser_model`: ValueError: ")
    monkeypatch.setattr(training, "_run_flow", lambda *_, **__: (_ for _ in ()).throw(other))
    with pytest.raises(PydanticSerializationError):
        cli.main()


def test_a_lost_rank_ends_the_command_in_a_message(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1: it is no mistake of the user's. Control: a defect keeps its traceback."""

    def lose(*_: object, **__: object) -> None:
        raise RankLost("main", 0, "exited with signal 9 (SIGKILL)", here / "main-rank0.log")

    monkeypatch.setattr(training, "_run_flow", lose)
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "recipe.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: group main, rank 0: exited with signal 9 (SIGKILL)")
    monkeypatch.setattr(training, "_run_flow", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_stopped_run_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming needs a manifest; a run without one trained nothing, and starts anew, with its recipe if it has one."""
    monkeypatch.setattr(server, "start_server", lambda: None)

    def stopped() -> str:
        with pytest.raises(SystemExit) as ended, running.ending_in_words("sft", here / "run"):
            raise KeyboardInterrupt
        assert ended.value.code == 130
        return capsys.readouterr().err

    assert "give the same command again" in stopped()
    (here / "run").mkdir()
    (here / "run" / "config.yaml").touch()
    assert f"penstock sft {terminal.short_path(here / 'run')}/config.yaml --run" in stopped()
    (here / "run" / "manifest.json").write_text("{}", encoding="utf-8")
    assert f"penstock sft --resume {terminal.short_path(here / 'run')}" in stopped()


def test_the_run_folder_has_the_name_and_the_place_of_the_recipe(here: Path, penstock: Callable[..., str]) -> None:
    """Also a place that does not exist yet."""
    with pytest.raises(Started):
        penstock("train", "recipe.yaml", "folder=there/runs", "name=mine")
    (run,) = (here / "there" / "runs").iterdir()
    assert run.name.startswith("mine-")


def begun(run: RunFolder, recipe: str, iteration: int = 0) -> None:
    """Write what a training has once it has begun."""
    run.config.write_text(signed(recipe), encoding="utf-8")
    write_manifest(run, Manifest(Progress(iteration=iteration)))


def completed(folder: Path) -> RunFolder:
    """A run of three iterations with nothing left to do."""
    run = RunFolder(folder)
    (run.path / "models" / "final").mkdir(parents=True)
    begun(run, f"{RECIPE}\niterations: 3\n", iteration=3)
    tracked = {"tracker": "mlflow", "run": "m", "label": "MLflow", "address": "sqlite:////runs/mlflow.db"}
    summary = {"status": "completed", "tracked": tracked, "prefect_flow_run_id": "p"}
    run.summary.write_text(json.dumps(summary), encoding="utf-8")
    return run


def test_a_complete_run_is_not_resumed(here: Path, penstock: Callable[..., str]) -> None:
    """It says so and where the report is; nothing is written. Control: one whose export is missing is resumed."""
    run = completed(here / "run")
    before = tree(here)
    said = penstock("train", "--resume", "run")
    assert "run is complete: nothing is left to do" in said
    assert str(run.report) in said
    assert tree(here) == before
    (run.path / "models" / "final").rmdir()
    with pytest.raises(Started):
        penstock("train", "--resume", "run")


def test_a_dry_run_shows_configuration_placement_and_memory(here: Path, penstock: Callable[..., str]) -> None:
    """Overrides and defaults resolved, one line per group, and nothing written."""
    before = tree(here)
    given = ("seed=7", "algorithm.kl.coefficient=0.01", "checkpoint.every=500")
    shown = penstock("train", "recipe.yaml", *given, "--dry-run")
    assert "seed: 7" in shown
    assert "normalize_by_std: true" in shown
    for text in (
        "placement and memory estimate",
        "main",
        "actor, reference, rollout",
        "CPU",
        "activations",
        "actor: nothing",
        "'checkpoint.every' (500) has no effect: the training has",
        "reshard: shared (the rollout engine reads the actor's own weights)",
    ):
        assert text in " ".join(shown.split()), text
    assert tree(here) == before


def test_keys_lists_every_key_with_its_meaning(penstock: Callable[..., str]) -> None:
    """One line a key, defaults included."""
    shown = penstock("keys")
    for text in ("actor.optimizer.learning_rate", "1e-06", "sampling temperature", "checkpoint.keep"):
        assert text in shown, text


def test_help_imports_neither_engines_nor_prefect() -> None:
    """So that it answers at once. Control: the same probe sees typer."""
    heavy = ("torch", "vllm", "deepspeed", "transformers", "prefect", "mlflow", "pandas", "typer")
    code = (
        "import sys; from penstock.cli.main import main; sys.argv = ['penstock', '--help']; main();"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "reinforcement learning" in done.stdout
    assert done.stdout.splitlines()[-1] == "['typer']"


@pytest.mark.parametrize("first", ["the first import", "the last one"])
@pytest.mark.parametrize("ignored", [False, True], ids=["heeded", "ignored"])
def test_ctrl_c_while_the_command_is_imported_ends_it_with_a_word(first: str, ignored: bool) -> None:
    """Even where Python drops exceptions, as in a finaliser. Control: a shell's background job, which ignores it."""
    module = "typer" if first == "the first import" else "penstock.session.flow_runs.failures"
    code = (
        "import signal, sys\n"
        f"if {ignored}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "class Finalised:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "class Finder:\n"
        f"    def find_spec(self, name, *_): name != {module!r} or Finalised() is None\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from penstock.cli.main import main\n"
        "sys.argv = ['penstock', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ((0, "") if ignored else (130, "stopped\n"))
    assert done.stdout.startswith("penstock ") == ignored


@pytest.mark.parametrize("quiet", [True, False])
def test_prefect_keeps_all_that_it_keeps_in_its_home(tmp_path: Path, quiet: bool) -> None:
    """Where PREFECT_HOME says so. Control: Prefect by itself, whose server then warns if there is no ~/.prefect."""
    code = (
        "import sys; from penstock.cli.libraries import quiet_libraries\n"
        "if sys.argv[1] == 'True': quiet_libraries()\n"
        "from prefect.settings import get_current_settings\n"
        "settings = get_current_settings()\n"
        "print(settings.server.memo_store_path, settings.results.local_storage_path)"
    )
    elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = elsewhere | {"PREFECT_HOME": str(tmp_path / "records"), "HOME": str(tmp_path / "me")}
    command = [sys.executable, "-c", code, str(quiet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    home = tmp_path / ("records" if quiet else "me/.prefect")
    assert done.stdout.split() == [str(home / "memo_store.toml"), str(home / "storage")]


def test_a_folder_is_shown_so_that_it_can_be_typed(here: Path, penstock: Callable[..., str]) -> None:
    """From here where that is the shorter way, else from the root; in a command a space does not divide it."""
    run = completed(here / "my run")
    assert "my run is complete" in penstock("train", "--resume", "my run")
    deep = here / "a" / "b" / "c"
    assert terminal.short_path(deep) == "a/b/c"
    assert terminal.short_path(Path("/proc")) == "/proc"
    (here / "far away").mkdir()
    run.path.rename(here / "far away" / "run")
    assert "penstock ui 'far away'" in penstock("train", "--resume", "far away/run")


@pytest.mark.parametrize(
    ("command", "option", "is_key"),
    [
        ("preference", "loss.settings.beta", True),
        ("preference", "rollout.samples", False),
        ("sweep", "rollout.samples", True),
        ("chain", "iterations", False),
        ("doctor", "iterations", False),
    ],
)
def test_an_option_is_called_a_key_where_the_command_has_that_key(
    refusal: Callable[..., str], command: str, option: str, is_key: bool
) -> None:
    """What the message proposes would be taken. Control: a key of another command's recipe is no option, no more."""
    said = refusal(command, "recipe.yaml", f"--{option}=3")
    assert "No such option" in said and (f"without dashes: {option}=VALUE" in said) == is_key


def test_another_kind_of_keys_is_refused_in_words(refusal: Callable[..., str]) -> None:
    """Without the word that pydantic puts before ours."""
    said = refusal("keys", "trian")
    assert "'trian' is not one of 'train'" in said and "Value error" not in said
