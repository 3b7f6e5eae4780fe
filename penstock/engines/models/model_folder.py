"""A causal LM as a Hugging Face folder, and the proof that the folder, loaded anew, is the same model.

The proof is in two parts: every tensor bit by bit, which finds damage however small, and the logits of a few prompts,
which finds what tensors do not show (a configuration that makes another model of them). It runs on the CPU.

Left out: the tokenizer, which only needs copying, and whether vLLM serves the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig

from penstock.base.errors import UserError
from penstock.base.files import share_weights_of
from penstock.base.model_code import Code, trusted
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.models.loading import hold_corrections, in_float32, keep_corrections_exact, kind_for
from penstock.engines.models.peft import write_adapter
from penstock.engines.models.seeing import frozen_encoder
from penstock.engines.weights.lora import attach, check_frozen, load_adapter, merged_state

# Share of the largest logit. Equal weights give logits that differ by the order of sums alone, as addresses decide it.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Proof:
    """What was compared: tensors bit by bit, logits of some prompts by their largest difference."""

    tensors: int
    prompts: int
    dtype: str
    largest_logit: float
    logit_difference: float
    logit_tolerance: float


def load_folder(folder: Path, code: Code | None = None) -> Any:
    """Return the model of a folder in the dtype that its configuration names.

    Args:
        code: that a folder is trusted to bring.

    Raises:
        UserError: its code is another, a file is damaged, or weights are missing, of another shape, or of no use to the
            architecture.
    """
    try:
        own = trusted(folder, code)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=own)
        keep_corrections_exact(kind_for(config), config)
        loaded: Any = kind_for(config).from_pretrained(
            folder,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=own,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder} cannot be loaded: {error}", "look at the disk; then export again") from error
    lm, info = loaded
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if found := [f"{kind.replace('_', ' ')}: {', '.join(names[:3])}" for kind, names in wrong.items() if names]:
        raise UserError(f"{folder} does not fit its architecture ({'; '.join(found)})", "export again")
    hold_corrections(lm)
    return lm.eval()


def with_weights(folder: Path, weights: Mapping[str, torch.Tensor], code: Code | None = None) -> Any:
    """Return the model of `folder` with other weights, in their dtype and storage; what rests in training stays.

    Raises:
        UserError: the weights are of another architecture.
    """
    lm = load_folder(folder, code)
    encoder = frozen_encoder(lm, next(iter(weights.values())).dtype)
    resting = {name: value.detach() for name, value in lm.named_parameters() if not value.requires_grad}
    try:
        lm.load_state_dict({**encoder, **resting, **weights}, strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"the checkpoint's weights do not fit {folder}: {error}", "name the run's own model") from error
    lm.tie_weights()
    lm.config.dtype = next(iter(weights.values())).dtype
    return lm


def with_adapters(
    folder: Path,
    adapters: Mapping[str, torch.Tensor],
    config: LoraConfig,
    base_sum: int,
    written: Path,
    code: Code | None = None,
) -> Any:
    """Return the model of `folder` with adapters merged into it, and write them by themselves to `written`.

    Args:
        base_sum: of the folder's weights, as the checkpoint recorded it.

    Raises:
        UserError: the adapters are of another architecture, other settings or other weights.
    """
    lm = load_folder(folder, code)
    exact = in_float32(lm)
    lm.to(next(iter(adapters.values())).dtype)
    for parameter, values in exact.items():  # as in the trainer, which keeps these as they were
        parameter.data = values
    attach(lm, config, seed=0)
    check_frozen(base_sum, lm)
    try:
        load_adapter(lm, adapters)
    except ValueError as error:
        raise UserError(f"the checkpoint does not fit {folder}: {error}", "name the run's own model") from error
    write_adapter(lm, written)
    return with_weights(folder, merged_state(lm), code)


def write_folder(lm: Any, folder: Path, max_shard_size: str) -> None:
    """Write configuration, generation settings and weights in files of at most `max_shard_size`, e.g. "5GB"."""
    lm.save_pretrained(folder, max_shard_size=max_shard_size)
    share_weights_of(folder)


@torch.no_grad()
def prove_same(lm: Any, folder: Path, prompts: Sequence[Sequence[int]], code: Code | None = None) -> Proof:
    """Load `folder` and compare it with `lm`, on prompts of token ids.

    Raises:
        UserError: it cannot be loaded, a tensor differs in a bit, or logits differ by more than rounding.
    """
    loaded = load_folder(folder, code)
    ours, theirs = lm.state_dict(), loaded.state_dict()
    if wrong := [name for name, value in ours.items() if not _equal(value, theirs.get(name))]:
        raise UserError(
            f"{folder}: {len(wrong)} of {len(ours)} tensors are not those of the source, the first is {wrong[0]}",
            "look at the disk; then export again",
        )
    pairs = [(_logits(lm, prompt), _logits(loaded, prompt)) for prompt in prompts]
    difference = max(float((a_TV - b_TV).abs().max()) for a_TV, b_TV in pairs)
    largest = max(float(a_TV.abs().max()) for a_TV, _ in pairs)
    tolerance = TOLERANCES[lm.dtype] * max(largest, 1.0)
    if not difference <= tolerance:  # also refuses NaN
        raise UserError(
            f"{folder}: logits differ by up to {difference:.3g} from the source's (tolerance {tolerance:.3g})",
            "compare its config.json with that of the run's model",
        )
    return Proof(len(ours), len(prompts), str(lm.dtype).removeprefix("torch."), largest, difference, tolerance)


def _equal(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and value.dtype == other.dtype and torch.equal(value, other)


def _logits(lm: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of a prompt's tokens in float32, [T, V]."""
    logits_TV: torch.Tensor = lm(torch.tensor([list(prompt)])).logits[0].float()
    return logits_TV
