"""The whole training as a flow: it learns, it leaves behind what it promises, and it fails in the open.

One training on two ranks learns, another imitates, a third earns a constant and then breaks; every test looks at one.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pandas as pd
import psutil
import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import Artifact
from prefect.variables import Variable
from safetensors.torch import load_file

from penstock.base.errors import UserError
from penstock.configs.loading.load import load_config
from penstock.engines.models import model_folder
from penstock.engines.models.model_folder import write_folder
from penstock.flows.train import train
from penstock.reports.alarms import RULES
from penstock.reports.samples.fallen import compared
from penstock.reports.samples.page import SAMPLES_PAGE
from penstock.reports.samples.reading import rows_of, samples_of
from penstock.reports.samples.tokens import load_tokenizer, pieces
from penstock.session.settings import forget_overrides, variable_name
from penstock.state.digests import is_whole
from penstock.state.experience import column_names, read_columns
from penstock.state.manifest import ended, read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.tasks.export_run import export_run
from penstock.trackers.mlflow import connect, default_tracking_uri
from tests.delivering import tracked_run
from tests.flows.reward_functions import BREAK, low_digit
from tests.processes import words_of
from tests.sockets import Door, noted_doors, open_to_others

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 12
SMALL = (
    "data.arithmetic={digits: 2, sft: 512, train: 512, heldout: 256}",
    "sft.steps=20",
    "rollout={prompts: 64, samples: 4, max_response_tokens: 6, max_sequences: 256}",
    "actor.optimizer={learning_rate: 1e-3, warmup_steps: 0}",
)
LEARNING = (
    f"iterations={ITERATIONS}",
    "reward.function=tests.flows.reward_functions:low_digit",
    "evaluate={every: 6, temperature: 1.0, samples: 2}",
    "checkpoint={every: 5, keep: 2}",
    "record={samples_every: 4, samples: 3, experiment: learning}",
    "groups.main={ranks: 2, roles: [actor, rollout]}",
)
CONSTANT = (
    "iterations=5",
    "reward.function=tests.flows.reward_functions:constant",
    "evaluate={every: 2, temperature: 0.0, prompts: 100}",
    "checkpoint.every=2",
    "algorithm.correction={weights: token}",
)

DOORS: set[Door] = set()  # on which `learned` has listened
EPOCH = 6  # iterations that take each of its prompts once
IMITATING = (
    f"iterations={EPOCH}",
    "algorithm={name: rft, mini_batches: 1}",
    f"data.arithmetic.train={EPOCH * 64}",
    "data.sampler={name: curriculum, column: carries}",
    "checkpoint.every=0",
    "reward.function=tests.flows.reward_functions:low_digit",
    f"evaluate={{every: {EPOCH}, temperature: 1.0, samples: 2}}",
)


def run_training(folder: Path, *overrides: str) -> RunFolder:
    """Run the quickstart with overrides in this process, where one that was killed has left live values."""
    Variable.set(variable_name(RunFolder(folder)), {"rollout.temperature": 1e-6})
    train(load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *overrides]), run_folder=str(folder))
    return RunFolder(folder)


@dataclass(frozen=True)
class Broken:
    """A failed training: its folder, its error, and the rank processes that were there right after."""

    run: RunFolder
    error: BaseException
    ranks_left: list[psutil.Process]


@pytest.fixture(scope="module")
def learned(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training on two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with noted_doors(DOORS):
            return run_training(tmp_path_factory.mktemp("runs") / "learned", *LEARNING)


@pytest.fixture(scope="module")
def imitated(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training on accepted responses, one epoch from easy to hard. Live values go after its end is recorded.

    It has no checkpoint: killed in its end, it would do all iterations again, and is to do them with those values.
    """

    def forgotten(run: RunFolder) -> None:
        assert ended(run)
        forget_overrides(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("penstock.flows.train.forget_overrides", forgotten)
        return run_training(tmp_path_factory.mktemp("runs") / "imitated", *IMITATING)


@pytest.fixture(scope="module")
def broken(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    """A training with a constant reward whose reward function breaks in iteration 3."""
    run = RunFolder(tmp_path_factory.mktemp("runs") / "broken")
    before = ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv(BREAK, str(run.experience(3)))
        with pytest.raises(Exception, match="broken") as caught:
            run_training(run.path, *CONSTANT)
    return Broken(run, caught.value, [rank for rank in ranks() if rank not in before])


def test_other_machines_reach_no_socket_of_a_training(learned: RunFolder) -> None:
    """Neither those of its ranks, the store and gloo's, nor the flow's own or Prefect's. Control: test_sockets.py."""
    of_ranks = [door for door in DOORS if "penstock.engines.groups.rank" in door.command]
    assert len(of_ranks) >= 3  # the store, and of gloo at least one for each rank
    assert len(DOORS) > len(of_ranks)
    assert open_to_others(DOORS) == []


def ranks() -> list[psutil.Process]:
    """Return the rank processes below this one; other tests may have engines of their own."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "penstock.engines.groups.rank" in words_of(child)
    ]


def attempts(run: RunFolder, name: str) -> int:
    """Return how often the task of that name ran."""
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    parent = FlowRunFilterParentFlowRunId(any_=[UUID(summary["prefect_flow_run_id"])])
    with get_client(sync_client=True) as client:
        iterations = [
            item.id for item in client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
        ]
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=iterations)))
    (found,) = [item for item in tasks if item.name == name]
    return found.run_count


def heldout(run: RunFolder, iteration: int) -> float:
    """Return the share of held-out responses with a low digit, whatever the run's own reward is."""
    responses = read_columns(run.evaluation(iteration), ["response"])["response"]
    return sum(low_digit(response, ".") for response in responses) / len(responses)


def test_it_learns_what_is_rewarded(learned: RunFolder) -> None:
    """Held-out reward rises from about a third to nearly all."""
    assert heldout(learned, 0) < 0.5
    assert heldout(learned, ITERATIONS) > 0.85
    updates = [record["metrics"]["actor/grad_norm"] for record in read_metrics(learned)[1:]]
    assert all(norm > 0 for norm in updates)


def test_it_learns_nothing_from_a_constant(broken: Broken) -> None:
    """The control: a reward that says nothing moves no weight at all."""
    assert heldout(broken.run, 2) == heldout(broken.run, 0)
    assert len(read_columns(broken.run.evaluation(2), ["reward"])["reward"]) == 100
    assert [record["metrics"]["actor/grad_norm"] for record in read_metrics(broken.run)[1:]] == [0.0, 0.0]


def test_imitating_accepted_responses_learns_from_easy_to_hard(imitated: RunFolder) -> None:
    """Held-out reward rises; accepted is what was rewarded; each prompt comes once, by the carries of its addition."""
    assert heldout(imitated, EPOCH) > heldout(imitated, 0) + 0.25
    ids, carries = [], []
    for number in range(1, EPOCH + 1):
        columns = read_columns(imitated.experience(number), ["prompt_id", "prompt", "reward", "accepted"])
        assert columns["accepted"].tolist() == columns["reward"].tolist()
        assert 0 < columns["accepted"].mean() < 1
        ids += columns["prompt_id"][::4]
        carries += [_carries(prompt) for prompt in columns["prompt"][::4]]
    assert len(set(ids)) == len(ids) == EPOCH * 64
    assert carries == sorted(carries)
    assert set(carries) == {0, 1, 2}


def _carries(prompt: str) -> int:
    left, right = prompt.rstrip("=").split("+")
    ones = int(left[1]) + int(right[1]) > 9
    return ones + (int(left[0]) + int(right[0]) + ones > 9)


def test_without_checkpoints_there_is_the_model_alone(imitated: RunFolder) -> None:
    """Nothing to resume from, and nothing to resume for: `--resume` of the completed run starts no engine."""
    assert not imitated.checkpoints.exists() or not any(imitated.checkpoints.iterdir())
    assert read_manifest(imitated).checkpoint is None
    assert (imitated.model("final") / "model.safetensors").exists()
    assert train(resume=str(imitated.path)) == str(imitated.path)


def test_the_summary_agrees_with_what_was_recorded(learned: RunFolder) -> None:
    """Every field is there, and the figures are those of the iterations."""
    summary = json.loads(learned.summary.read_text(encoding="utf-8"))
    records = [record["metrics"] for record in read_metrics(learned)]
    manifest = read_manifest(learned)
    assert summary.pop("seconds") > sum(record["time/iteration_s"] for record in records[1:])
    assert summary.pop("tokens_per_second") > 0
    shares = summary.pop("time_shares")
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert {"rollout", "reward", "advantage", "update_actor", "reshard", "evaluate", "other"} <= shares.keys()
    assert all(share > 0 for share in shares.values())
    assert summary == {
        "status": "completed",
        "iterations": ITERATIONS,
        "accuracy_before": records[0]["heldout/accuracy"],
        "accuracy_after": records[-1]["heldout/accuracy"],
        "heldout_temperature": records[-1]["heldout/temperature"],
        "greedy_before": records[0]["heldout/greedy_accuracy"],
        "greedy_after": records[-1]["heldout/greedy_accuracy"],
        "reward_first": records[1]["reward/mean"],
        "reward_last": records[-1]["reward/mean"],
        "gpus": 0,
        "actor_mfu": None,  # a CPU has no peak to compare with
        "parameters": 338_784,
        "parameters_shared": 26,
        "parameters_copied": 0,
        "reshard_strategy": "shared",
        "attention": "PyTorch's, of rows side by side",
        "recomputed": {"actor": "nothing", "sft": "nothing"},
        "kv_cache_stays": None,  # a CPU's is never given back
        "tracked": [
            {
                "tracker": "mlflow",
                "run": tracked_run(learned),
                "label": "MLflow",
                "address": default_tracking_uri(learned.path.parent),
            }
        ],
        "prefect_flow_run_id": manifest.prefect_flow_run_id,
    }
    assert heldout(learned, ITERATIONS) == records[-1]["heldout/accuracy"]


def test_the_run_folder_holds_all_that_was_made(learned: RunFolder) -> None:
    """Figures and experience of each iteration, newest checkpoints, the model, the report, logs of ranks and host."""
    assert [record["iteration"] for record in read_metrics(learned)] == list(range(ITERATIONS + 1))
    every = [learned.experience(number) for number in range(1, ITERATIONS + 1)]
    left = [path for path in (learned.path / "experience").iterdir() if path.suffix != ".whole"]
    assert sorted(left) == every, "no part, no file of a forward pass is left"
    assert all(is_whole(path) for path in every)
    assert len([*(learned.path / "experience").glob(".*.whole")]) == len(every)
    assert [path.name for path in sorted(learned.checkpoints.iterdir())] == ["000010", "000012"]
    assert sorted(path.name for path in learned.logs.iterdir()) == ["host.log", "main-rank0.log", "main-rank1.log"]
    names = ("report/index.html", "report/report.md", "report/reward.png", "models/final/model.safetensors")
    for name in (*names, "models/final/tokenizer.json", "evaluation/000006.parquet"):
        assert (learned.path / name).stat().st_size > 0
    assert not list(learned.path.rglob("*.partial"))


def test_experience_can_be_followed_from_prompt_to_advantage(learned: RunFolder) -> None:
    """One row per sample in prompt order, rows of a prompt together, each stamped with the policy that wrote it."""
    names = {
        *("sample_id", "prompt_id", "group", "prompt", "response", "prompt_tokens", "response_tokens", "loss_mask"),
        *("truncated", "policy_version", "reward", "reward_failure", "logprobs_old", "advantages"),
    }
    for number in range(1, ITERATIONS + 1):
        assert set(pd.read_parquet(learned.experience(number)).columns) == names
    path = learned.experience(4)
    columns = read_columns(path, ["group", "response", "reward", "policy_version", "advantages", "response_tokens"])
    assert columns["group"].tolist() == [number // 4 for number in range(256)]
    assert set(columns["policy_version"]) == {3}
    assert columns["reward"].tolist() == [low_digit(response, ".") for response in columns["response"]]
    assert columns["advantages"].offsets_B1.tolist() == columns["response_tokens"].offsets_B1.tolist()


def test_rollout_and_trainer_agree_on_what_was_drawn(learned: RunFolder, broken: Broken) -> None:
    """Asked for by a correction: one log-prob per token, equal up to rounding. Control: unasked for there is none."""
    records = [record["metrics"] for record in read_metrics(broken.run)[1:]]
    assert len(records) == 2
    for number, metrics in enumerate(records, start=1):
        assert 0 < metrics["mismatch/probability_difference_max"] < 1e-4
        assert metrics["mismatch/effective_sample_share"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["alarm/rollout_mismatch"] == 0.0
        columns = read_columns(broken.run.experience(number), ["logprobs_rollout", "response_tokens"])
        drawn, tokens = columns["logprobs_rollout"], columns["response_tokens"]
        assert drawn.offsets_B1.tolist() == tokens.offsets_B1.tolist()
        assert -20 < drawn.values_T.min() < drawn.values_T.max() <= 0
    assert "logprobs_rollout" not in column_names(learned.experience(1))
    assert not any(name.startswith("mismatch/") for name in read_metrics(learned)[1]["metrics"])


def test_vllm_and_the_actor_are_compared_before_and_after_the_first_update(learned: RunFolder) -> None:
    """And then at the interval, which is longer than this run; the seconds are a figure, too."""
    records = {record["iteration"]: record["metrics"] for record in read_metrics(learned)}
    compared = {number: metrics for number, metrics in records.items() if "rollout/logprob_gap" in metrics}
    assert list(compared) == [0, 1]
    for metrics in compared.values():
        assert 0 < metrics["rollout/logprob_gap"] <= metrics["rollout/logprob_gap_max"] < 1e-4
        assert metrics["time/compare_logprobs_s"] > 0


def test_evaluations_have_intervals(learned: RunFolder) -> None:
    """Two responses per prompt, side by side; every figure has been computed from what the file holds."""
    columns = read_columns(learned.evaluation(6), ["prompt_id", "sample_id", "reward", "truncated"])
    assert columns["prompt_id"][0::2] == columns["prompt_id"][1::2]
    assert len(set(columns["sample_id"])) == 512
    (metrics,) = [record["metrics"] for record in read_metrics(learned) if record["iteration"] == 6]
    rewards_P2 = columns["reward"].reshape(-1, 2)
    assert metrics["heldout/accuracy"] == metrics["heldout/mean_at_2"] == rewards_P2.mean()
    assert metrics["heldout/best_at_2"] == rewards_P2.max(axis=1).mean()
    assert metrics["heldout/worst_at_2"] == rewards_P2.min(axis=1).mean()
    assert metrics["heldout/accuracy/low"] < metrics["heldout/accuracy"] < metrics["heldout/accuracy/high"]
    assert metrics["heldout/distinct_2"] > 0
    assert "best@2" in (learned.path / "report" / "report.md").read_text(encoding="utf-8")


def test_the_only_alarm_is_the_one_that_fits(learned: RunFolder) -> None:
    """The reward reads the third character alone: the policy forgets to end its responses, and soon most are cut."""
    iterations = [record["metrics"] for record in read_metrics(learned)[1:]]
    cut = [metrics["rollout/truncated_share"] >= 0.25 for metrics in iterations]
    raised = [metrics["alarm/truncation"] for metrics in iterations]
    assert raised == [float(all(cut[max(0, number - 4) : number + 1]) and number >= 4) for number in range(ITERATIONS)]
    assert raised[0] == 0.0
    assert raised[-1] == 1.0
    others = {name for metrics in iterations for name in metrics if name.startswith("alarm/")} - {"alarm/truncation"}
    of_others = {"alarm/truncation", "alarm/rollout_mismatch", "alarm/tokens_too_old"}
    assert others == {rule.metric for rule in RULES} - of_others
    assert not any(metrics[name] for metrics in iterations for name in others)
    page = (learned.path / "report" / "report.md").read_text(encoding="utf-8")
    assert "responses are cut" in page
    assert "swings up and down" not in page


def test_mlflow_holds_the_run(learned: RunFolder) -> None:
    """FINISHED, with parameters, a value per iteration, sample tables and the report."""
    uri, run_id = default_tracking_uri(learned.path.parent), tracked_run(learned)
    client = connect(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "learned"
    assert client.get_experiment(run.info.experiment_id).name == "learning"
    assert run.data.params["rollout.samples"] == "4"
    assert run.data.tags["algorithm"] == "grpo"
    assert run.data.tags["prefect.flow_run_id"] == read_manifest(learned).prefect_flow_run_id
    logged = {entry.step: entry.value for entry in client.get_metric_history(run_id, "reward/mean")}
    recorded = {item["iteration"]: item["metrics"]["reward/mean"] for item in read_metrics(learned)[1:]}
    assert logged == recorded
    assert {item.path for item in client.list_artifacts(run_id)} >= {"config.yaml", "summary.json", "report", "samples"}
    assert f"]({run.data.tags['prefect.flow_run_url']})" in run.data.tags["mlflow.note.content"]
    assert "report/samples.html" in {item.path for item in client.list_artifacts(run_id, "report")}
    tables = [item.path for item in client.list_artifacts(run_id, "samples")]
    assert tables == [f"samples/{number:06d}.json" for number in (4, 8, 12)]
    assert len(client.load_table(run.info.experiment_id, tables[0], run_ids=[run_id])) == 3


def test_checkpoints_are_timed_and_sized_in_the_figures(learned: RunFolder) -> None:
    """In the iterations that wrote one, and in no other; MLflow holds the same."""
    recorded = {record["iteration"]: record["metrics"] for record in read_metrics(learned)}
    sizes = {number: metrics["checkpoint/gib"] for number, metrics in recorded.items() if "checkpoint/gib" in metrics}
    assert list(sizes) == [5, 10, 12]
    beside = {"sha256.json", "manifest.json", "config.yaml", "prompts.jsonl"}  # what is not the engines'
    files = [path for path in learned.checkpoint(12).rglob("*") if path.is_file() and path.name not in beside]
    assert sizes[12] * 2**30 == sum(path.stat().st_size for path in files)
    assert all(recorded[number]["time/checkpoint_s"] > 0 for number in sizes)
    uri, run_id = default_tracking_uri(learned.path.parent), tracked_run(learned)
    history = connect(uri).get_metric_history(run_id, "checkpoint/gib")
    assert {entry.step: entry.value for entry in history} == sizes


def test_a_complete_run_is_not_taken_up_again(learned: RunFolder) -> None:
    """Not by a deployment either: no engine starts, and nothing in the folder changes."""

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in learned.path.rglob("*")}

    before = files()
    assert train(resume=str(learned.path)) == str(learned.path)
    assert files() == before


def test_the_variable_of_live_values_goes_with_a_complete_run(learned: RunFolder, broken: Broken) -> None:
    """Control: a run that failed can be resumed, and would read it again: its own, not what another run had left."""
    assert Variable.get(variable_name(learned), default=None) is None
    assert Variable.get(variable_name(broken.run), default=None) == {}


def test_an_export_links_the_weights_and_is_registered_by_reference(learned: RunFolder, tmp_path: Path) -> None:
    """A folder with the same weights on disk once, a card with the run's figures, and a model of the run in MLflow."""
    exported = export_run(learned, tmp_path / "out", None)
    final = learned.model("final") / "model.safetensors"
    assert (exported.folder / "model.safetensors").samefile(final)
    assert exported.proof.logit_difference == 0
    card = (exported.folder / "README.md").read_text(encoding="utf-8")
    accuracy = read_metrics(learned)[-1]["metrics"]["heldout/accuracy"]
    assert f"→ {accuracy:.1%}" in card
    assert "| Algorithm | grpo |" in card
    uri, run_id = default_tracking_uri(learned.path.parent), tracked_run(learned)
    model = connect(uri).get_logged_model(str(exported.models["MLflow"]))
    assert (model.source_run_id, model.tags["penstock.folder"]) == (run_id, str(exported.folder))
    with pytest.raises(UserError, match="not an empty folder"):
        export_run(learned, tmp_path / "out", None)


def test_an_export_of_a_checkpoint_is_the_model_that_the_engines_export(learned: RunFolder, tmp_path: Path) -> None:
    """The last checkpoint's weights are bit by bit those of models/final, though no engine was started for them.

    Controls: the checkpoint before it has others, and a damaged one is refused.
    """
    interrupted = RunFolder(tmp_path / "interrupted")
    shutil.copytree(learned.path, interrupted.path, ignore=shutil.ignore_patterns("final", "experience"))
    final = load_file(learned.model("final") / "model.safetensors")
    assert _weights(export_run(interrupted, None, "200KB").folder, final)

    manifest = read_manifest(interrupted)
    earlier = replace(manifest, checkpoint="000010", progress=replace(manifest.progress, iteration=10))
    write_manifest(interrupted, earlier)
    exported = export_run(interrupted, tmp_path / "earlier", None)
    assert not _weights(exported.folder, final)
    assert "| Iterations | 10 |" in (exported.folder / "README.md").read_text(encoding="utf-8")

    with (interrupted.checkpoint(10) / "state-main-0.safetensors").open("r+b") as stream:
        stream.seek(-200, 2)
        stream.write(b"damage")
    with pytest.raises(UserError, match=r"state-main-0\.safetensors is damaged(.|\n)*goes on from the one before"):
        export_run(interrupted, tmp_path / "damaged", None)


def test_an_export_that_is_not_its_source_leaves_nothing(
    learned: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that the disk loses while the weights are written."""

    def lossy(lm: Any, folder: Path, max_shard_size: str) -> None:
        write_folder(lm, folder, max_shard_size)
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(model_folder, "write_folder", lossy)
    with pytest.raises(UserError, match="tensors are not those of the source"):
        export_run(learned, tmp_path / "out", "5GB")
    assert not list(tmp_path.iterdir())


def _weights(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether the files of a folder hold the expected tensors, all and no others."""
    found = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_prefect_shows_every_iteration_as_a_flow_of_named_tasks(learned: RunFolder) -> None:
    """The training's page leads to its iterations, and theirs to the steps, all complete."""
    parent = UUID(str(read_manifest(learned).prefect_flow_run_id))
    with get_client(sync_client=True) as client:
        flow = client.read_flow_run(parent)
        below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
        children = client.read_flow_runs(flow_run_filter=below)
        second = [child.id for child in children if child.name == "iteration-000002"]
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=second)))
    assert flow.name == "train-quickstart"
    assert {"recipe:quickstart", "algorithm:grpo", "model:tiny", "run:learned"} <= set(flow.tags)
    iterations = [f"iteration-{number:06d}" for number in range(1, ITERATIONS + 1)]
    assert sorted(child.name for child in children) == [*iterations, "supervised-warm-up"]
    steps = ("rollout", "reward", "old-logprobs", "advantage", "update-actor", "reshard", "live-overrides", "record")
    assert sorted(task.name for task in tasks) == sorted(f"{step}-000002" for step in steps)
    states = [flow.state, *(child.state for child in children), *(task.state for task in tasks)]
    assert all(state is not None and state.is_completed() for state in states)


def test_its_page_in_prefect_tells_how_it_went(learned: RunFolder, broken: Broken) -> None:
    """Progress, a table for each evaluation, samples, a link to the tracker. Control: a training that broke."""
    assert {key: len(found) for key, found in artifacts(learned).items()} == {
        **{"progress": 1, "held-out": 3, "samples": 3},
        **{"tracker-run": 1, "live-values": 1, "training-report": 1},
    }
    (progress,) = artifacts(learned)["progress"]
    reward = read_metrics(learned)[-1]["metrics"]["reward/mean"]
    assert str(progress.description).startswith(f"**Iteration 12 of 12** · reward {reward:.3f} · held-out accuracy ")
    (progress,) = artifacts(broken.run)["progress"]
    assert str(progress.description).startswith("**Ended after iteration 2 of 5** · reward 0.500")
    assert float(str(progress.data)) == 40.0


def artifacts(run: RunFolder) -> dict[str, list[Artifact]]:
    """Return what a training's flow run has made for its page, by key."""
    name = UUID(json.loads(run.summary.read_text(encoding="utf-8"))["prefect_flow_run_id"])
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[name])))
    keys = {str(item.key) for item in found}
    return {key: [item for item in found if item.key == key] for key in keys}


def test_its_samples_can_be_looked_at(learned: RunFolder, broken: Broken) -> None:
    """Each response is its tokens, and of a prompt those that earn more have the higher advantages; the page has the
    last iteration and those of the tables. Control: the training that learned nothing has no advantages."""
    tokenizer, samples = load_tokenizer(learned), samples_of(learned, None)
    assert samples.iteration == ITERATIONS
    best, *_, worst = samples.at(rows_of(samples, "reward", False, len(samples)), tokens=True)
    assert best.reward > worst.reward
    assert best.advantage >= 0 >= worst.advantage
    for response in (best, worst):
        assert "".join(piece.text for piece in pieces(tokenizer, response)).removesuffix("<eos>") == response.response
    page = (learned.path / "report" / SAMPLES_PAGE).read_text(encoding="utf-8")
    assert re.findall(r"Iteration (\d+)</h2>", page) == ["12", "8", "4", "1"]
    assert 'href="samples.html"' in learned.report.read_text(encoding="utf-8")
    silent = samples_of(broken.run, 2)
    assert not silent.values("advantage").any()


def test_prompts_that_lost_most_are_found(learned: RunFolder) -> None:
    """Between the first and the last evaluation nearly all gained, and those shown are the others."""
    found = compared(learned, *(samples_of(learned, number, heldout=True) for number in (0, ITERATIONS)), 100)
    assert found.prompts == 256
    assert found.gained > 10 * found.lost
    assert len(found.fallen) == found.lost
    figures = {figure.name: figure.change for figure in found.figures}
    assert figures["reward"] == pytest.approx(heldout(learned, ITERATIONS) - heldout(learned, 0))


def test_a_broken_reward_function_fails_the_run_in_the_open(broken: Broken) -> None:
    """Its own error comes out; folder, MLflow and Prefect say failed; no rank is left; it can be resumed."""
    assert isinstance(broken.error, UserError)
    assert attempts(broken.run, "reward-000003") == 1, "a user's mistake is not tried again"
    assert "this reward function is broken" in str(broken.error)
    assert broken.ranks_left == []
    summary = json.loads(broken.run.summary.read_text(encoding="utf-8"))
    assert summary["status"] == "failed"
    assert summary["iterations"] == 2
    assert "failed" in (broken.run.path / "report" / "report.md").read_text(encoding="utf-8")
    uri = default_tracking_uri(broken.run.path.parent)
    assert connect(uri).get_run(summary["tracked"][0]["run"]).info.status == "FAILED"
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(summary["prefect_flow_run_id"])).state
    assert state is not None
    assert state.is_failed()
    assert state.message == str(broken.error), "the sentence of the terminal, with what to do"
    assert read_manifest(broken.run).progress.iteration == 2
    assert not broken.run.model("final").exists()
