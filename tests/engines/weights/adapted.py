"""Models with adapters that say something, and the log-probs of some rows by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.batches.packing import pack
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from penstock.engines.weights.lora import adapted_layers, attach
from tests.engines.rows import random_rows

ROWS = random_rows(6)
EVERY = list(range(len(ROWS)))


def load_adapted(
    folder: Path, config: LoraConfig, seed: int = 0, spread: float = 0.1, dtype: torch.dtype = torch.float32
) -> Any:
    """The model of a folder with adapters whose B is no longer zero."""
    lm = load_causal_lm(folder, dtype, False)
    attach(lm, config, seed)
    generator = torch.Generator().manual_seed(11)
    for layer in adapted_layers(lm).values():
        nn.init.normal_(layer.lora_B, std=spread, generator=generator)
    return lm


def packed_logprobs(lm: Any) -> torch.Tensor:
    """Log-probs of the rows' responses, as the trainer computes them."""
    logprobs_T: torch.Tensor = PackedPolicy(lm).eval()(pack(ROWS, EVERY, torch.device("cpu")), 1.0)[0]
    return logprobs_T
