"""The rank of `penstock bench families`: a training's, and beside it the Transformers library by itself.

The library computes one whole row at a time with an attention of its own, on the CPU in float32. Suffix: `_T` response
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from penstock.base.ragged import Ragged
from penstock.benchmarks.families.measuring import CompareGradients, GradientGap, LibraryLogprobs
from penstock.data.images import ImageFolder
from penstock.engines.batches.images import NUMBERS
from penstock.engines.batches.packing import Rows, pack, read_rows
from penstock.engines.commands.forward import TokenValues
from penstock.engines.models.loading import kind_for, load_causal_lm
from penstock.engines.models.models import PackedPolicy
from penstock.engines.models.seeing import freeze_encoder
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out
from penstock.engines.ranks.worker import Worker
from penstock.state.experience import IMAGES, read_columns

CPU = torch.device("cpu")


class FamilyRank(Worker):
    """A rank that also carries out the benchmark's own commands, which this file registers."""


@carries_out(LibraryLogprobs)
@torch.no_grad()
def library_logprobs(_: RankModels, command: LibraryLogprobs) -> TokenValues:
    """Compute them."""
    model, see = _library_model(command.folder), _seeing(command.folder, command.pictures)
    rows = Rows(command.prompts, command.responses, command.responses, {})
    logprobs = [_logprobs_T(model, rows, row, see, command.images) for row in range(len(rows))]
    return TokenValues(np.arange(len(rows)), torch.cat(logprobs).numpy())


@carries_out(CompareGradients)
def compare_gradients(_: RankModels, command: CompareGradients) -> GradientGap:
    """Compute both."""
    rows, library = read_rows(command.path), _library_model(command.folder)
    folder, images = _seeing(command.folder, command.pictures), None
    whole = rows
    if folder is not None:
        read = read_columns(command.path, ["prompt_tokens", IMAGES])
        whole, images = replace(rows, prompts=read["prompt_tokens"]), read[IMAGES]
    torch.cat([_logprobs_T(library, whole, row, folder, images) for row in range(len(rows))]).mean().backward()
    policy = PackedPolicy(load_causal_lm(command.folder, torch.float32, False), images=folder).eval()
    policy(pack(rows, list(range(len(rows))), CPU), 1.0)[0].mean().backward()
    freeze_encoder(library)
    theirs, ours = (_gradients(model) for model in (library, policy.lm))
    norm = torch.cat([value.flatten() for value in theirs.values()]).norm()
    gap = torch.cat([(ours[name] - value).flatten() for name, value in theirs.items()]).norm()
    return GradientGap(float(gap / norm))


def _library_model(folder: str) -> Any:
    """Load a model with the library's attention written out: its faster kernels leave caps of scores out."""
    model = kind_for(
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ).from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="eager",
    )
    return model.eval()


def _seeing(folder: str, pictures: str | None) -> ImageFolder | None:
    return None if pictures is None else ImageFolder(Path(pictures), folder)


def _logprobs_T(
    model: Any, rows: Rows, row: int, folder: ImageFolder | None = None, images: Ragged | None = None
) -> torch.Tensor:
    prompt, response = rows.prompts.row(row), rows.responses.row(row)
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    seen: dict[str, Any] = {}
    if folder is not None and images is not None:
        if model.config.image_token_id in response:  # the library takes it for one more image
            return torch.full((len(response),), torch.nan)
        pixels, grids = zip(*map(folder.pixels, images.row(row).reshape(-1, NUMBERS)[:, 0].tolist()), strict=True)
        seen = {
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (tokens == model.config.image_token_id).int(),
        }
    logprobs_TV = (
        model(input_ids=tokens, use_cache=False, **seen).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    )
    return logprobs_TV.gather(-1, tokens[0, len(prompt) :, None])[:, 0]


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: parameter.grad for name, parameter in trained if parameter.grad is not None}
