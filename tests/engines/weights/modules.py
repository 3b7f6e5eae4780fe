"""Both sides of a fused layer as plain modules: Hugging Face's parts, and vLLM's whole without its machinery."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Hugging Face's side: three matrices, and a fourth that is not fused."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)
        self.o_proj = nn.Linear(8, 8, bias=False)


class Uninitialised(nn.Module):
    """A layer that leaves its parameters to a loader, as vLLM's do."""

    def __init__(self, rows: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 8))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows))


class FusedAttention(nn.Module):
    """vLLM's side."""

    def __init__(self, o_rows: int = 8) -> None:
        super().__init__()
        self.qkv_proj = Uninitialised(16, bias=True)
        self.o_proj = Uninitialised(o_rows, bias=False)
