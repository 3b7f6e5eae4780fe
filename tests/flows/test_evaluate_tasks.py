"""Tasks of lm-evaluation-harness: the package itself on vLLM, with tasks and data of one's own, nothing downloaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from penstock.base.errors import UserError
from penstock.configs.sections.model import TinyModel
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.models.tiny import make_tiny_model
from penstock.flows.evaluate import evaluate
from penstock.tasks.evaluation.harness import check_tasks, figures_in, values_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is missing: pip install lm-eval"),
]

TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
CHOICE = f"""{TASK}
task: local_choice
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATED = f"""{TASK}
task: local_sums
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 6}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
GONE = CHOICE.replace("sums.jsonl", "gone.jsonl").replace("local_choice", "local_gone")
DOCUMENTS = 24


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two models of random weights, tasks and their data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for seed, name in enumerate(("one", "other")):
        folder = tmp_path / name
        folder.mkdir()
        make_byte_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ends = tokenizer.eos_token_id, tokenizer.pad_token_id
        make_tiny_model(folder, TinyModel(max_positions=128), len(tokenizer), *ends, seed)
    (tmp_path / "tasks").mkdir()
    for name, text in (("choice", CHOICE), ("sums", GENERATED), ("gone", GONE)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    rows = [{"question": f"{n}+{n}=", "answer": f"{2 * n:03d}"} for n in range(10, 10 + DOCUMENTS)]
    wrong = [{**row, "choices": [row["answer"], f"{int(row['answer']) + 1:03d}"], "label": 0} for row in rows]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong), encoding="utf-8")
    return tmp_path


def test_tasks_are_looked_up_before_anything_starts(here: Path) -> None:
    """Neither an unknown one, nor one without its data, nor a folder elsewhere. Control: those that are there."""
    check_tasks(["local_choice", "local_sums"], Path("tasks"))
    with pytest.raises(UserError, match="has no task 'local_choise'"):
        check_tasks(["local_choise"], Path("tasks"))
    with pytest.raises(UserError, match="the task 'local_gone' cannot be loaded"):
        check_tasks(["local_gone"], Path("tasks"))
    with pytest.raises(UserError, match="outside of the working folder"):
        check_tasks(["local_choice"], here.parent)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prefect_harness")
def test_tasks_are_in_the_same_table_with_paired_differences(here: Path) -> None:
    """The harness's own figures, to the last bit; intervals and differences over documents, as over prompts."""
    found = Path(evaluate(["one", "other"], tasks=["local_choice", "local_sums"], include_path="tasks", to="results"))
    content = json.loads((found / "evaluation.json").read_text(encoding="utf-8"))
    for label in ("one", "other"):
        (results,) = (found / label / "tasks").rglob("results_*.json")
        theirs = json.loads(results.read_text(encoding="utf-8"))["results"]["local_choice"]["acc,none"]
        ours = content["figures"][label]
        assert ours["local_choice/acc"] == theirs
        assert ours["local_choice/acc/low"] <= theirs <= ours["local_choice/acc/high"]
        assert ours["local_sums/exact_match"] == 0.0  # random weights add nothing up
    accuracies = [content["figures"][label]["local_choice/acc"] for label in ("one", "other")]
    assert accuracies[0] != accuracies[1]  # the control: two models
    values = pd.read_parquet(found / "evaluation.parquet")
    choices = values[values["figure"] == "local_choice/acc"].pivot(index="prompt", columns="model", values="value")
    assert len(choices) == DOCUMENTS
    difference = content["differences"]["of"]["other"]["local_choice/acc"]
    assert difference == pytest.approx((choices["other"] - choices["one"]).mean())
    assert difference == pytest.approx(accuracies[1] - accuracies[0])
    assert "local_choice/acc" in (found / "evaluation.md").read_text(encoding="utf-8")


def test_results_of_the_harness_are_read_as_it_writes_them(tmp_path: Path) -> None:
    """The newest results count; another filter than the usual one is named; what is no number is left out.

    A document is a line, whatever characters that end lines elsewhere are in it.
    """
    old = {"results": {"sums": {"acc,none": 0.0}}}
    new = {"results": {"sums": {"alias": "sums", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1.0}}}
    for name, content in (("2026-01-01", old), ("2026-01-02", new)):
        (tmp_path / f"results_{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert list(figures_in(tmp_path)) == [("sums/acc", 0.5, 0.1), ("sums/em (strict)", 1.0, None)]
    sample = {"doc_id": 3, "metrics": ["acc", "f1"], "filter": "none", "acc": 1.0, "f1": [1, 2], "doc": "a\u2028b\x85"}
    line = json.dumps(sample, ensure_ascii=False) + "\n"
    (tmp_path / "samples_sums_2026-01-02T00-00-00.5.jsonl").write_text(line, encoding="utf-8")
    assert list(values_in(tmp_path)) == [("sums/acc", "sums-000003", 1.0)]
