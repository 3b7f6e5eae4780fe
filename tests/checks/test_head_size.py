"""A model whose attention vLLM does not compute on a CPU is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import model
from penstock.configs.loading.load import config_from_mapping
from penstock.engines.families.served import cpu_head_sizes

SMALL = {"hidden_size": 32, "heads": 2, "kv_heads": 1}  # heads of 16


def checked(tiny: dict[str, Any]) -> None:
    model.check_head_size(config_from_mapping({"model": {"tiny": tiny}}, "test"))


def test_heads_of_another_size_are_refused_with_the_sizes_there_are() -> None:
    """The rank would end in the middle of vLLM's first step. Control: the default's heads of 32."""
    with pytest.raises(UserError, match="heads of 16 numbers; on a CPU, vLLM computes 32, 64"):
        checked(SMALL)
    checked({})


def test_on_a_gpu_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the kernels are others. Control: the test above."""
    monkeypatch.setattr(model, "visible_gpus", lambda: [0])
    checked(SMALL)


@pytest.mark.slow
def test_the_sizes_are_vllms_own() -> None:
    """What is read from its file is what its class says."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == set(CPUAttentionBackend.get_supported_head_sizes())
