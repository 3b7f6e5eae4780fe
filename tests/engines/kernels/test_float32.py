"""What keeps float32 numbers whole in kernels written in Triton; what they compute shows on GPUs alone."""

from __future__ import annotations

import pytest
import torch
from triton import knobs

from penstock.configs.schema import TrainConfig
from penstock.engines.ranks.models import RankModels


@pytest.mark.parametrize(
    ("device", "dtype", "exact"), [("cuda", "float32", True), ("cuda", "auto", False), ("cpu", "float32", False)]
)
def test_a_rank_that_computes_in_float32_on_a_gpu_rounds_nothing(
    device: str, dtype: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kernels that are compiled from then on. Controls: bfloat16, where it would cost time, and a CPU."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setitem(vars(knobs.language), "fp32_default", None)
    models = RankModels(0, 1, torch.device(device))
    models.configure(TrainConfig.model_validate({"model": {"tiny": {}, "dtype": dtype}}))
    assert knobs.language.fp32_default == ("ieee" if exact else None)
