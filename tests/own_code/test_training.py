"""A model that only code of its own loads is trained, evaluated, exported and resumed where that code is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from penstock.base.errors import UserError
from penstock.base.model_code import code_of
from penstock.configs.loading.load import load_config
from penstock.flows.evaluate import evaluate
from penstock.flows.train import train
from penstock.session.opening import TRAIN, Resume, looked_at
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.tasks.export_run import export_run
from penstock.trackers.mlflow import connect, default_tracking_uri
from tests.own_code.model import write_own_model
from tests.training import SHORTEST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A warm-up and two iterations, from a folder with its own model and tokenizer."""
    place = tmp_path_factory.mktemp("runs")
    write_own_model(place / "model")
    overrides = [
        *(override for override in SHORTEST if not override.startswith("sft")),
        *("model.tiny=null", f"model.path={place / 'model'}", "model.trust_remote_code=true"),
        *("data.arithmetic.sft=64", "sft={steps: 2, batch: 16}"),
        *("checkpoint.every=1", "rollout.compare_every=1", "record.experiment=own_code"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(load_config(ROOT / "configs" / "quickstart.yaml", overrides), run_folder=str(place / "run"))
    return RunFolder(place / "run")


def test_it_is_trained_as_it_is_served_and_on_record(trained: RunFolder) -> None:
    """vLLM and the actor give tokens the same log-probs; config.yaml and MLflow have the SHA-256 of each file."""
    code = code_of(trained.path.parent / "model")
    assert len(code) == 3
    assert load_config(trained.config, []).model.code == code
    records = [record["metrics"] for record in read_metrics(trained) if record["iteration"] > 0]
    assert [record["rollout/logprob_gap"] < 1e-5 for record in records] == [True, True]
    client = connect(default_tracking_uri(trained.path.parent))
    (tracked,) = read_manifest(trained).tracked
    params = client.get_run(tracked.run).data.params
    assert {name: params[f"model.code.{name}"] for name in code} == code


@torch.no_grad()
@pytest.mark.parametrize("checkpoint", [None, "000001"])
def test_an_export_loads_as_the_model_did(trained: RunFolder, tmp_path: Path, checkpoint: str | None) -> None:
    """In the Transformers library alone, model and tokenizer; as a Llama it would be another model."""
    out = tmp_path / "out"
    export_run(trained, out, None, checkpoint)
    assert code_of(out) == code_of(trained.path.parent / "model")
    lm = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(lm).__name__ == "OursForCausalLM"
    tokens = AutoTokenizer.from_pretrained(out, trust_remote_code=True)("12+34=", return_tensors="pt")["input_ids"]
    logits, as_llama = lm(tokens).logits, LlamaForCausalLM.from_pretrained(out)(tokens).logits
    assert (logits - as_llama).abs().max() > 0.01
    before = AutoModelForCausalLM.from_pretrained(trained.path.parent / "model", trust_remote_code=True)
    assert 0 < (logits - before(tokens).logits).abs().max() < (logits - as_llama).abs().max()


def test_other_code_is_refused(trained: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a resume, and by an export and an evaluation of a checkpoint, which begin with the warm-up's model.

    Control: with the files as they were all three go on.
    """
    monkeypatch.chdir(ROOT)
    files = [folder / "modeling_ours.py" for folder in (trained.path.parent / "model", trained.model("sft"))]
    text = files[0].read_text(encoding="utf-8")
    resume, checkpoint = Resume(trained.path, None, ["iterations=3"]), trained.checkpoint(2)
    for file in files:
        file.write_text(f"{text}# harmless\n", encoding="utf-8")
    said = r"the code in .*(model|sft) is not what this run trusts: modeling_ours.py"
    with pytest.raises(UserError, match=said):
        looked_at(TRAIN, resume)
    with pytest.raises(UserError, match=said):
        export_run(trained, tmp_path / "out", None, checkpoint.name)
    with pytest.raises(UserError, match=said):
        evaluate([str(checkpoint)], to=str(tmp_path / "evaluated"))
    for file in files:
        file.write_text(text, encoding="utf-8")
    assert looked_at(TRAIN, resume) is not None
    evaluate([str(checkpoint)], to=str(tmp_path / "evaluated"))
    train(resume=str(trained.path), changes=["iterations=3"])
    assert read_metrics(trained)[-1]["iteration"] == 3
