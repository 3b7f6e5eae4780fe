"""The rank of `penstock bench families`: a training's, and beside it the Transformers library by itself.

The library computes one whole row at a time with an attention of its own, on the CPU in float32. Suffix: `_T` response
tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from penstock.benchmarks.families.measuring import CompareGradients, GradientGap, LibraryLogprobs
from penstock.engines.batches.packing import Rows, pack, read_rows
from penstock.engines.commands.forward import TokenValues
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out
from penstock.engines.ranks.worker import Worker

CPU = torch.device("cpu")


class FamilyRank(Worker):
    """A rank that also carries out the benchmark's own commands, which this file registers."""


@carries_out(LibraryLogprobs)
@torch.no_grad()
def library_logprobs(_: RankModels, command: LibraryLogprobs) -> TokenValues:
    """Compute them."""
    model = _library_model(command.folder)
    rows = Rows(command.prompts, command.responses, command.responses, {})
    logprobs = [_logprobs_T(model, rows, row) for row in range(len(rows))]
    return TokenValues(np.arange(len(rows)), torch.cat(logprobs).numpy())


@carries_out(CompareGradients)
def compare_gradients(_: RankModels, command: CompareGradients) -> GradientGap:
    """Compute both."""
    rows, library = read_rows(command.path), _library_model(command.folder)
    torch.cat([_logprobs_T(library, rows, row) for row in range(len(rows))]).mean().backward()
    policy = PackedPolicy(load_causal_lm(command.folder, torch.float32, False)).eval()
    policy(pack(rows, list(range(len(rows))), CPU), 1.0)[0].mean().backward()
    theirs, ours = (_gradients(model) for model in (library, policy.lm))
    norm = torch.cat([value.flatten() for value in theirs.values()]).norm()
    gap = torch.cat([(ours[name] - value).flatten() for name, value in theirs.items()]).norm()
    return GradientGap(float(gap / norm))


def _library_model(folder: str) -> Any:
    """Load a model with the library's attention written out: its faster kernels leave caps of scores out."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="eager",
    )
    return model.eval()


def _logprobs_T(model: Any, rows: Rows, row: int) -> torch.Tensor:
    prompt, response = rows.prompts.row(row), rows.responses.row(row)
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logprobs_TV = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs_TV.gather(-1, tokens[0, len(prompt) :, None])[:, 0]


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
