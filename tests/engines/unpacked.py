"""What the engines must agree with: plain torch on one whole row at a time, in the library's own attention.

Nothing here packs, splits, shards or shares. Suffixes: `_T` response tokens of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.engines.batches.packing import Rows

# With an epsilon of 1 AdamW's first step is lr x g / (|g| + 1), close to plain gradient descent. With the usual one
# it is the sign of g, which turns rounding errors of vanishing gradients into whole steps.
STEADY: dict[str, Any] = {"eps": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.01}
UNCLIPPED = 1e9


def load_unpacked(folder: Path, kind: Any = AutoModelForCausalLM, attention: str = "sdpa") -> Any:
    """The model of a folder with the library's own attention, by default PyTorch's kernel, in float32."""
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, attn_implementation=attention)


def row_tokens(rows: Rows, row: int) -> tuple[torch.Tensor, int]:
    """All tokens of a row as a batch of one, and how many of them are the prompt."""
    prompt, response = rows.prompts.row(row), rows.responses.row(row)
    return torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None], len(prompt)


def row_logprobs(lm: Any, rows: Rows, row: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs_T of the response's tokens, and the entropies_T of the distributions that they were drawn from."""
    tokens, prompt = row_tokens(rows, row)
    logprobs_TV = (lm(input_ids=tokens).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
    chosen_T = logprobs_TV.gather(-1, tokens[0, prompt:, None])[:, 0]
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def row_values(lm: Any, head: nn.Linear, rows: Rows, row: int) -> torch.Tensor:
    """Values_T of the states before each response token."""
    tokens, prompt = row_tokens(rows, row)
    hidden_TH = lm.base_model(input_ids=tokens).last_hidden_state[0, prompt - 1 : -1]
    return head(hidden_TH)[:, 0]


@dataclass(frozen=True)
class PlainStep:
    """One optimizer step of the plain loop."""

    loss: float
    grad_norm: float  # before clipping


def plain_steps(
    parameters: list[nn.Parameter],
    losses: list[Callable[[], torch.Tensor]],
    learning_rates: list[float],
    max_grad_norm: float,
) -> list[PlainStep]:
    """Take one AdamW step per loss, each computed whole and clipped by torch's own function."""
    adamw = torch.optim.AdamW(parameters, eps=STEADY["eps"], betas=STEADY["betas"], weight_decay=STEADY["weight_decay"])
    taken = []
    for loss, rate in zip(losses, learning_rates, strict=True):
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        value = loss()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        adamw.step()
        taken.append(PlainStep(value.item(), norm.item()))
    return taken
