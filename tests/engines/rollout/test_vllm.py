"""What versions of libraries need is done before anything depends on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.benchmarks.workload.families import write_family
from penstock.engines.families.served import DECODERS
from penstock.engines.rollout import vllm as versions


@pytest.mark.parametrize(("known", "asked"), [(True, 0), (False, 1)])
def test_vllm_starts_no_process_to_look_at_the_engines_model(
    known: bool, asked: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine whose cache is empty. Control: an architecture that nobody prepared for does start one."""
    from vllm.model_executor.models import registry

    started: list[object] = []
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", started.append)
    monkeypatch.setattr(registry.ModelRegistry, "models", dict(registry.ModelRegistry.models))
    if known:
        versions.inspect_in_this_process(["Olmo2ForCausalLM", "NobodysForCausalLM"])
    registry.ModelRegistry._try_inspect_model_cls("Olmo2ForCausalLM")
    assert len(started) == asked
    assert "NobodysForCausalLM" not in registry.ModelRegistry.models


@pytest.mark.parametrize("name", sorted(DECODERS.values()))
def test_a_decoder_that_vllms_table_lacks_is_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM 0.26, whose decoder of Qwen3.5 tells of no state. Control: where the table has it, it stays."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import interfaces

    versions.take_resizing_from_pillow()
    from vllm.model_executor.models import qwen3_5

    known, models = ModelRegistry.models[name], dict(ModelRegistry.models)
    monkeypatch.setattr(ModelRegistry, "models", models)
    versions.serve_decoders_of_qwen35([name])
    assert models[name] is known
    del models[name]
    decoder = type("Decoder", (torch.nn.Module, interfaces.HasInnerState), {})
    monkeypatch.setattr(qwen3_5, name, decoder)
    versions.serve_decoders_of_qwen35(["LlamaForCausalLM", name])
    served: Any = models[name].load_model_cls()
    assert issubclass(served, decoder) and interfaces.is_hybrid(served) and interfaces.supports_mrope(served)
    whole: Any = qwen3_5.Qwen3_5ForConditionalGeneration
    for told in versions.STATES_TOLD:
        assert getattr(served, told).__func__ is getattr(whole, told).__func__
    positions_3N, later = served().get_mrope_input_positions([5, 6, 7], [])
    assert positions_3N.tolist() == [[0, 1, 2]] * 3 and later == 0


def test_values_of_sequences_are_spread_over_their_drafts() -> None:
    """One for each token, none for a sequence without, and another in the place of the one to be replaced."""
    temperatures_B, ends_B = torch.tensor([0.5, 3.0, 0.0, 2.0]), torch.tensor([2, 2, 3, 6], dtype=torch.int32)
    assert versions._spread(temperatures_B, ends_B, 6, 0, 1).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert versions._spread(temperatures_B, ends_B, 6).tolist() == [0.5, 0.5, 0.0, 2.0, 2.0, 2.0]


def test_code_is_compiled_once_for_a_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In whatever folder the model is. Controls: a model of another shape, and vLLM by itself, have another hash."""
    from vllm import EngineArgs
    from vllm.config import ModelConfig

    def hashed(folder: Path) -> str:
        started = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="float32").create_engine_config()
        assert started.model_config.model == str(folder)
        return str(started.compute_hash())

    monkeypatch.setattr(ModelConfig, "compute_hash", ModelConfig.compute_hash)
    one, other, wider = (tmp_path / name for name in ("one", "other", "wider"))
    write_family("Qwen 3", one)
    shutil.copytree(one, other)
    shutil.copytree(one, wider)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    assert hashed(one) != hashed(other)
    for _ in range(2):  # a second engine of the process changes nothing
        versions.find_compiled_code_by_shape()
        assert hashed(one) == hashed(other) != hashed(wider)
