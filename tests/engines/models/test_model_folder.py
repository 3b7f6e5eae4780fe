"""An exported folder is proven to be its source: damage of one bit, a lost tensor, another configuration all show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.model_folder import load_folder, prove_same, with_adapters, with_weights, write_folder
from penstock.engines.weights.lora import adapter_state, attach, frozen_sum, merged_state
from tests.engines.shared_ranks import Shape

PROMPTS = [[5, 9, 12, 33], [7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its embeddings tied."""
    path = tmp_path_factory.mktemp("model")
    Shape("qwen3", tied=True).write(path)
    return path


def exported(folder: Path, target: Path, shard: str = "200KB") -> Any:
    """Write the model of `folder` to `target`; return it."""
    lm = load_folder(folder)
    write_folder(lm, target, shard)
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1  # whoever reads one reads all
    return lm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_several_files_is_the_same_model(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Written in shards and loaded anew in its own dtype: every tensor and every logit."""
    weights = {name: value.to(dtype) + 0.25 for name, value in load_folder(folder).state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # tied: a checkpoint names it twice
    lm = with_weights(folder, weights)
    write_folder(lm, tmp_path / "out", "200KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    proof = prove_same(lm, tmp_path / "out", PROMPTS)
    assert proof.tensors == len(weights)
    assert proof.dtype == str(dtype).removeprefix("torch.")
    assert 0 <= proof.logit_difference <= proof.logit_tolerance < proof.largest_logit
    with pytest.raises(UserError, match="tensors are not those of the source"):  # control: these are other weights
        prove_same(load_folder(folder), tmp_path / "out", PROMPTS)


def test_a_flipped_bit_in_a_shard_is_found(folder: Path, tmp_path: Path) -> None:
    """The lowest bit of the last weight of the last file: no logit would tell."""
    lm = exported(folder, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-4] ^= 1  # little-endian: the first of a float's bytes is its lowest
    shard.write_bytes(content)
    with pytest.raises(UserError, match="1 of .* tensors are not those of the source"):
        prove_same(lm, tmp_path, PROMPTS)


@pytest.mark.parametrize(("damage", "said"), [("cut", "cannot be loaded"), ("drop", "missing keys: model.norm.weight")])
def test_a_cut_file_and_a_lost_tensor_are_named(folder: Path, tmp_path: Path, damage: str, said: str) -> None:
    """As user errors, before any comparison."""
    from safetensors.torch import load_file, save_file

    lm = exported(folder, tmp_path, "5GB")
    file = tmp_path / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        kept = {name: value for name, value in load_file(file).items() if name != "model.norm.weight"}
        save_file(kept, file, {"format": "pt"})
    with pytest.raises(UserError, match=said):
        prove_same(lm, tmp_path, PROMPTS)


def test_equal_weights_under_another_configuration_are_another_model(folder: Path, tmp_path: Path) -> None:
    """Tensors agree, logits do not."""
    lm = exported(folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="logits differ by up to"):
        prove_same(lm, tmp_path, PROMPTS)


def test_weights_of_another_architecture_are_refused(folder: Path) -> None:
    """With the name of what does not fit."""
    with pytest.raises(UserError, match="do not fit"):
        with_weights(folder, {"model.norm.weight": torch.zeros(3)})


def test_what_rests_in_training_stays_the_folders(tmp_path: Path) -> None:
    """A checkpoint has no corrections of routers, which no gradient reaches. Control: they are not 0."""
    lm = load_folder(write_family("GLM-4.5", tmp_path / "model"))
    rests = {name: value.clone() for name, value in lm.named_parameters() if not value.requires_grad}
    trained = {name: value + 0.25 for name, value in lm.state_dict().items() if name not in rests}
    made = with_weights(tmp_path / "model", trained)
    write_folder(made, tmp_path / "out", "200KB")
    again = dict(load_folder(tmp_path / "out").named_parameters())
    assert rests and all(value.abs().min() > 0 for value in rests.values())
    assert all(torch.equal(again[name], value) for name, value in rests.items())
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(again[name], trained[name])


def test_adapters_in_bfloat16_are_exported_beside_exact_corrections(tmp_path: Path) -> None:
    """Of routers' choices, in float32 as the trainer keeps them. Controls: bfloat16 would round them; other weights."""
    folder, config = write_family("GLM-4.5", tmp_path / "model"), LoraConfig(rank=8, targets=["o_proj"], experts=True)
    lm = load_causal_lm(folder, torch.bfloat16, False)
    attach(lm, config, seed=0)
    for name, value in adapter_state(lm).items():
        torch.nn.init.constant_(value, 0.01 if name.endswith("lora_B") else 1.0)
    base_sum = frozen_sum(lm)
    made = with_adapters(folder, adapter_state(lm), config, base_sum, tmp_path / "adapter")
    written = merged_state(lm)
    (corrections,) = (name for name in written if name.endswith("e_score_correction_bias"))
    assert all(torch.equal(value, written[name]) for name, value in made.state_dict().items())
    values, kept = load_folder(folder).state_dict()[corrections], made.state_dict()[corrections]
    assert kept.dtype == torch.float32 and torch.equal(kept, values) and not torch.equal(kept, kept.bfloat16().float())
    with pytest.raises(UserError, match="trained beside other weights"):
        with_adapters(folder, adapter_state(lm), config, base_sum + 1, tmp_path / "other")
