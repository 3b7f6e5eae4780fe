"""What cannot be exported is refused with what to do, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.models.model_folder import Proof
from penstock.engines.training.state_images import StateImage, write_image
from penstock.engines.training.trained_state import MASTER
from penstock.engines.weights.lora import FROZEN_SUM, adapted_layers, adapter_state, attach, frozen_sum, merged_state
from penstock.state.digests import signed
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, seal_checkpoint, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics, locked
from penstock.tasks.export_run import _facts, export_run
from tests.engines.shared_ranks import Shape


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that has begun and has no checkpoint yet."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(signed("name: run\n"))
    write_manifest(run, Manifest(Progress()))
    return run


def test_a_run_without_trained_weights_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Nothing is at the target then."""
    with pytest.raises(UserError, match="has no checkpoint yet"):
        export_run(run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_kind_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Supervised training and that on preferences leave a whole folder; it is named. Control: the test above."""
    run.model("final").mkdir(parents=True)
    (run.model("final") / "config.json").write_text("{}")
    with pytest.raises(UserError, match="a whole model folder already"):
        export_run(run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_the_figures_are_those_of_the_weights(run: RunFolder) -> None:
    """Of the last iteration for the final model, also without any checkpoint; else of the checkpoint's."""
    for number, reward in enumerate((0.0, 0.25, 0.5)):
        append_metrics(run, number, {"reward/mean": reward, "heldout/accuracy": reward})
    proof = Proof(3, 2, "float32", 1.0, 0.0, 1e-3)
    final = _facts(run, Manifest(Progress()), run.model("final"), proof).figures
    assert (final["iterations"], final["accuracy_after"], final["reward_last"]) == (2, 0.5, 0.5)
    saved = _facts(run, Manifest(Progress(iteration=1)), run.checkpoints / "000001", proof).figures
    assert (saved["iterations"], saved["accuracy_after"], saved["reward_last"]) == (1, 0.25, 0.25)


def test_a_run_in_training_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Its checkpoints come and go."""
    with locked(run), pytest.raises(UserError, match="is being trained"):
        export_run(run, tmp_path / "out", None)


@pytest.mark.parametrize("size", ["5", "5gb", "GB", "0GB", "-1GB", "5 GB"])
def test_a_size_must_be_a_size(run: RunFolder, tmp_path: Path, size: str) -> None:
    """The units are those of transformers."""
    with pytest.raises(UserError, match="is no size of a file"):
        export_run(run, tmp_path / "out", size)


def test_files_at_the_target_are_not_touched(run: RunFolder, tmp_path: Path) -> None:
    """Neither in a folder nor in place of one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for target in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(UserError, match="not an empty folder"):
            export_run(run, target, None)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def _with_adapters(run: RunFolder, base: Path) -> nn.Module:
    """Give the run a checkpoint of adapters, as an engine writes one; the model that it stands for."""
    Shape("qwen2", tied=True).write(base)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    attach(lm, LoraConfig(rank=2, alpha=6.0), seed=0)
    for layer in adapted_layers(lm).values():
        nn.init.normal_(layer.lora_B)
    aside = run.checkpoints / ".000001.partial"
    aside.mkdir(parents=True)
    trained = {f"lm.{name}": value for name, value in adapter_state(lm).items()}
    values = {
        "steps": 1,
        FROZEN_SUM: frozen_sum(lm),
        "parameters": {name: list(value.shape) for name, value in trained.items()},
        "tied": {},
        "dtype": "float32",
        "shares": {str(at): [[name, 0, value.numel(), 0]] for at, (name, value) in enumerate(trained.items())},
    }
    tensors = {f"actor/{at}/{MASTER}": value for at, value in enumerate(trained.values())}
    image = StateImage(tensors, {"group": "main", "rank": 0, "trained": {"actor": values}, "generators": {}})
    write_image(image, aside / "state-main-0.safetensors")
    saved = Manifest(Progress(iteration=1), checkpoint="000001", model=str(base))
    run.config.write_text(signed("name: run\nactor: {lora: {rank: 2, alpha: 6}}\n"))
    seal_checkpoint(aside, run.checkpoints / "000001", run, saved)
    run.prompts("train").parent.mkdir()
    write_columns(run.prompts("train"), {"prompt_tokens": Ragged.of([np.arange(3, 9)], np.int32)})
    write_manifest(run, saved)
    return lm


def test_a_checkpoint_of_adapters_is_exported_merged_with_the_adapter_beside_it(run: RunFolder, tmp_path: Path) -> None:
    """The folder is a whole model, and not the one that the run started from. Named without its zeros, as for a resume;
    one that there is not is answered with those there are.
    """
    lm = _with_adapters(run, tmp_path / "base")
    with pytest.raises(UserError, match="has no checkpoint 2\n  there are 000001"):
        export_run(run, tmp_path / "out", None, "2")
    exported = export_run(run, tmp_path / "out", None, "1")
    found = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32).state_dict()
    wanted = merged_state(lm)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    assert {name for name, value in found.items() if not torch.equal(value, start[name])} == set(adapted_layers(lm))
    names = {path.name for path in (exported.folder / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


def test_adapters_are_not_merged_into_other_weights(run: RunFolder, tmp_path: Path) -> None:
    """The folder that the run started from may have been written anew. Control: the test above."""
    _with_adapters(run, tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base.model.norm.weight.data[3] *= 2
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match="trained beside other weights"):
        export_run(run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
