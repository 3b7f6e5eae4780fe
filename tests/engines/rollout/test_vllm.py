"""What versions of libraries need is done before anything depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
