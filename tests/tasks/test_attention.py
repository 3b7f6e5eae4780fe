"""Which attention the ranks have is said, and loudly where it could be faster."""

from __future__ import annotations

import logging

import pytest

from penstock.engines.commands.build import Kernels
from penstock.tasks import start as prepare


@pytest.mark.parametrize(
    ("name", "slower", "levels"),
    [
        ("FlashAttention 4", [], ["INFO"]),
        ("FlashAttention 2", [], ["INFO"]),  # all that this GPU has
        ("FlashAttention 2", ["no FlashAttention 4: No module named 'quack'"], ["INFO", "WARNING"]),
    ],
)
def test_a_gpu_without_its_fastest_attention_is_worth_a_warning(
    name: str,
    slower: list[str],
    levels: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what cannot be imported. Controls: the kernels are there; the GPU is not one for them."""
    monkeypatch.setattr(prepare, "get_run_logger", lambda: logging.getLogger("task"))
    caplog.set_level(logging.INFO)
    assert prepare.attention_of(Kernels(name, slower)) == name
    assert [record.levelname for record in caplog.records] == levels
    assert caplog.messages[1:] == [f"updates are slower than this GPU can be, {obstacle}" for obstacle in slower]
