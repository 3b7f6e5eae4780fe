"""Rejection sampling, from the policy's responses to a policy that has learnt the best of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app
from penstock.configs.schema import TrainConfig
from penstock.flows.sft import sft
from tests.flows.dataflows.test_own_dataflow import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("prefect_harness")]


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as JSONL; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.exhaustive
def test_the_best_responses_are_learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample, select, supervised training: the policy then earns more, by the same command that sampled first.

    Control: sampling alone changes no weight. The pairs of the same run have a chosen and a rejected response each.
    """
    pairs = [(one, other) for one in range(1, 9) for other in range(1, 9)]
    questions = [{"question": f"{one}+{other}=", "response": str((3 * one + other) % 10)} for one, other in pairs]
    files = {name: str(written(tmp_path / f"{name}.jsonl", questions)) for name in ("train", "heldout")}
    data: dict[str, Any] = {"prompt": "question", "max_prompt_tokens": 16, **files}

    def taught(name: str, start: dict[str, Any], pairs: str) -> dict[str, Any]:
        """Return the model that supervised training makes of another."""
        learning = {"steps": 30, "batch": 32, "optimizer": {"learning_rate": 3e-3}}
        tree = {"model": start, "data": data | {"sft": pairs, "response": "response"}, "sft": learning}
        config = TrainConfig.model_validate(SMALL | tree | {"checkpoint": {}})
        return {"path": sft(config, run_folder=str(tmp_path / name))}

    start = taught("start", SMALL["model"], files["train"])  # it answers with a digit, and ends
    recipe = SMALL | {"data": data, "iterations": 2, "dataflow": "penstock.api.dataflows:sampled"}
    recipe["rollout"] = {"prompts": 32, "samples": 8, "max_response_tokens": 6, "max_sequences": 64}
    recipe["checkpoint"] = {"every": 0}

    first, best = penstock.train(recipe | {"model": start}, run_folder=tmp_path / "first"), tmp_path / "best.jsonl"
    weights = [(Path(folder) / "model.safetensors").read_bytes() for folder in (start["path"], first.model)]
    assert weights[0] == weights[1]
    for words in (["--to", str(best), "--least", "1"], ["--to", str(tmp_path / "pairs.jsonl"), "--pairs"]):
        done = CliRunner().invoke(app, ["select", str(first.folder), *words], catch_exceptions=False)
        assert done.exit_code == 0
    rows = [json.loads(line) for line in best.read_text(encoding="utf-8").splitlines()]
    assert {row["reward"] for row in rows} == {1.0}
    assert len({row["question"] for row in rows}) == len(rows) > 40
    preferred = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {(row["reward"], row["reward_rejected"]) for row in preferred} == {(1.0, 0.0)}

    learnt = taught("learnt", start, str(best))
    second = penstock.train(recipe | {"model": learnt}, run_folder=tmp_path / "second")
    before, after = (run.metrics["reward/mean"].iloc[1:].mean() for run in (first, second))
    assert after > before + 0.2
