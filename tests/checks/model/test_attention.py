"""A kernel that this machine's devices have not, and heads that none computes, are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.model import attention
from penstock.checks.model.starting_model import check_model
from penstock.configs.loading.load import config_from_mapping
from penstock.engines.families.served import cpu_head_sizes

SMALL = {"hidden_size": 32, "heads": 2, "kv_heads": 1}  # heads of 16


def checked(tiny: dict[str, Any]) -> None:
    attention.check_head_size(config_from_mapping({"model": {"tiny": tiny}}, "test"))


def test_heads_of_another_size_are_refused_with_the_sizes_there_are() -> None:
    """The rank would end in the middle of vLLM's first step. Control: the default's heads of 32."""
    with pytest.raises(UserError, match="heads of 16 numbers; on a CPU, vLLM computes 32, 64"):
        checked(SMALL)
    checked({})


def test_on_a_gpu_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the kernels are others. Control: the test above."""
    monkeypatch.setattr(attention, "visible_gpus", lambda: [0])
    checked(SMALL)


def attending(kernel: str, **sections: Any) -> None:
    check_model(config_from_mapping({"model": {"tiny": {}, "attention": kernel}, **sections}, "test"))


def test_a_kernel_of_other_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one that works. Controls: that one passes; of ranks elsewhere nothing is known yet."""
    monkeypatch.setattr(attention, "visible_gpus", list)
    for kernel in ("flash_attention_2", "flash_attention_4"):
        with pytest.raises(UserError, match=f"{kernel} needs a GPU") as refused:
            attending(kernel)
        assert "model.attention=sdpa" in refused.value.remedy
        elsewhere = {"far": {"hosts": 1, "ranks": 1, "roles": ["actor", "rollout"]}}
        attending(kernel, groups=elsewhere, hosts={"address": "10.0.0.1"})
    attending("sdpa")
    attending("auto")
    monkeypatch.setattr(attention, "visible_gpus", lambda: [0, 1])
    monkeypatch.setattr(attention, "gpu_name", lambda gpu: f"card {gpu}")
    monkeypatch.setattr(attention, "is_hopper", lambda gpu: gpu == 0)
    with pytest.raises(UserError, match="sdpa is for ranks on a CPU"):
        attending("sdpa")
    with pytest.raises(UserError, match="for Hopper GPUs, and GPU 1 is a card 1") as refused:
        attending("flash_attention_4")
    assert "flash_attention_2" in refused.value.remedy
    attending("flash_attention_2")
    monkeypatch.setattr(attention, "is_hopper", lambda gpu: True)
    attending("flash_attention_4")


def test_heads_that_flash_attention_has_no_kernel_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 36 and of 264. Control: of 40."""
    monkeypatch.setattr(attention, "visible_gpus", lambda: [0])
    for size, passes in ((36, False), (264, False), (40, True)):
        tiny = {"hidden_size": 2 * size, "heads": 2, "kv_heads": 2}
        config = config_from_mapping({"model": {"tiny": tiny, "attention": "flash_attention_2"}}, "test")
        if passes:
            attention.check_attention(config)
            continue
        with pytest.raises(UserError, match=f"heads of {size} numbers; FlashAttention computes multiples of 8 up to"):
            attention.check_attention(config)


@pytest.mark.slow
def test_the_sizes_are_vllms_own() -> None:
    """What is read from its file is what its class says."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == set(CPUAttentionBackend.get_supported_head_sizes())
