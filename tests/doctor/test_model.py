"""What `penstock doctor --model` says of a folder: how it is trained and served, up to where, or why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.benchmarks.workload.families import write_family
from penstock.configs.loading.load import load_config
from penstock.doctor.doctor import examine_recipe
from penstock.doctor.model import examine_model
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("Qwen 3", "served by a class of vLLM's own"),
        ("OLMo 2", "served as vLLM builds it from the Transformers library's class"),
        ("Granite", "logits times 0.25"),
        ("Gemma 2", "logits capped at 3; attention's scores capped"),
    ],
)
def test_a_model_that_is_trained_is_told_how(family: str, said: str, tmp_path: Path) -> None:
    lines = examine_model(write_family(family, tmp_path))
    assert {line.level for line in lines} == {"ok"}
    assert said in "\n".join(line.text for line in lines)


def test_a_length_beyond_which_it_is_another_is_a_warning(tmp_path: Path) -> None:
    (warning,) = (line for line in examine_model(write_family("Command R7B", tmp_path)) if line.level == "warning")
    assert "may have 64 tokens together" in warning.text and "data.max_prompt_tokens" in warning.remedy


@pytest.mark.parametrize(("family", "said"), [("gpt-oss", "yes"), ("ERNIE 4.5 MoE", "no"), ("Qwen 3", None)])
def test_a_mixture_is_told_whether_its_experts_get_adapters(family: str, said: str | None, tmp_path: Path) -> None:
    """Controls: a mixture of which no reshard knows the experts, and a model without any."""
    text = "\n".join(line.text for line in examine_model(write_family(family, tmp_path)))
    assert f"LoRA on experts: {said}" in text if said else "LoRA on experts" not in text


@pytest.mark.parametrize(
    ("family", "subject", "said"),
    [("Jamba", "model", "has layers of Mamba 1"), ("ERNIE 4.5 MoE", "rollout", "is a mixture of experts")],
)
def test_a_model_that_is_refused_is_a_problem(family: str, subject: str, said: str, tmp_path: Path) -> None:
    problem = examine_model(write_family(family, tmp_path))[-1]
    assert (problem.level, problem.subject) == ("problem", subject) and said in problem.text and problem.remedy


def test_a_recipes_model_is_told_with_the_recipe(tmp_path: Path) -> None:
    """Control: a tiny model that the run makes has no folder to look at."""
    write_family("OLMo 2", tmp_path / "model")
    changes = [f"model.path={tmp_path / 'model'}", "model.tiny=null", "sft=null", "iterations=1"]
    recipe = ROOT / "configs" / "careless.yaml"
    lines, _ = examine_recipe(load_config(recipe, changes))
    assert [line.subject for line in lines][-3:] == ["model", "training", "rollout"], lines
    assert {line.subject for line in examine_recipe(load_config(recipe))[0]} == {"recipe"}


def test_the_command_says_it_by_its_exit_code(tmp_path: Path) -> None:
    """A problem: 1. Beside a recipe it is a mistake: 2, and nothing is looked at."""
    folder, command = write_family("Jamba", tmp_path), [sys.executable, "-m", "penstock.cli.main", "doctor"]
    done = subprocess.run([*command, "--model", str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "1 problem" in done.stdout
    done = subprocess.run([*command, "a.yaml", "--model", str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "--model looks at a folder alone" in done.stderr
