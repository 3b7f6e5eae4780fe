"""The commands of training without rollout: on responses to imitate, on preferences, on scores.

Each loads one model, takes its steps, and writes it as a Hugging Face folder; the rank then holds nothing of it. They
are functions of the rank's `Worker`, which finds them by name in `COMMANDS`.

Left out: what a step is (engines/training/updates.py, engines/training/preference.py), and which rows it takes
(tasks/).
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from configs.schema import TrainConfig
from configs.sections.trainer import SftConfig
from engines.batches.packing import Rows
from engines.families.shape import read_shape
from engines.kernels.attention_kernel import kernel_figures
from engines.models.loading import start_reward_model, write_model
from engines.models.models import PackedPolicy, PackedRewardModel
from engines.training.preference import UnitLoss, measure_preferences, read_preferences, update_on_preferences
from engines.training.trainer import Trainer
from engines.training.updates import update_supervised
from engines.weights.layout import ordered_parameters
from penstock.state.experience import read_columns

if TYPE_CHECKING:
    from engines.ranks.worker import Worker

REMEDY = "look for odd rows in the data, or lower the learning rate, and begin anew"  # without finite gradients


def sft_begin(
    worker: Worker, config: dict[str, Any], folder: str, dtype: str, rows: str, seed: int, keep_logits: bool = False
) -> dict[str, Any]:
    """Load the model and the rows for supervised training; `seed` is that of new adapters."""
    worker.config = TrainConfig.model_validate({"model": {"dtype": dtype}, "seed": seed})
    sft = SftConfig.model_validate(config)
    worker.lm = worker.causal_lm(folder, sft)
    module = PackedPolicy(worker.lm, keep_logits)
    worker.trainers["sft"] = Trainer(module, ordered_parameters(worker.lm), sft, sft.steps, REMEDY)
    columns = read_columns(rows, ("prompt_tokens", "response_tokens", "loss_mask"))
    worker.sft_rows = Rows(columns["prompt_tokens"], columns["response_tokens"], columns["loss_mask"], {})
    return {}


def sft_steps(worker: Worker, batches: np.ndarray, budget: int, learning_rate: float) -> dict[str, Any]:
    """Take one optimizer step per row of `batches` (steps x rows); return each loss, and how many were skipped."""
    assert worker.sft_rows is not None
    trainer = worker.trainers["sft"]
    before = trainer.skipped
    metrics = [update_supervised(trainer, worker.sft_rows, index_B, budget, learning_rate) for index_B in batches]
    return {
        "losses": [step["loss"] for step in metrics],
        "grad_norm": metrics[-1]["grad_norm"],
        "skipped_steps": trainer.skipped - before,
    }


def sft_end(worker: Worker, folder: str) -> dict[str, Any]:
    """Write the model as a Hugging Face folder and free it."""
    return _end(worker, "sft", folder)


def preference_begin(
    worker: Worker,
    config: dict[str, Any],
    folder: str,
    dtype: str,
    scores: bool,
    seed: int,
    keep_logits: bool = False,
) -> dict[str, Any]:
    """Load the policy to train on preferences, or with `scores` a reward model made of it; return its kernels."""
    worker.config = TrainConfig.model_validate({"model": {"dtype": dtype}, "seed": seed})
    settings = SftConfig.model_validate(config)
    module: nn.Module
    if scores:
        classifier = start_reward_model(folder, worker.dtype, bool(settings.gradient_checkpointing))
        worker.lm = worker.to_train(classifier, settings)
        module = PackedRewardModel(worker.lm)
    else:
        worker.lm = worker.causal_lm(folder, settings)
        module = PackedPolicy(worker.lm, keep_logits)
    worker.trainers["preference"] = Trainer(module, ordered_parameters(worker.lm), settings, settings.steps, REMEDY)
    worker.shapes["preference"] = read_shape(Path(folder))
    return kernel_figures(worker.device.type)


def preference_steps(
    worker: Worker, path: str, batches: np.ndarray, budget: int, loss: dict[str, Any], learning_rate: float
) -> dict[str, Any]:
    """Take one optimizer step per row of `batches` (steps x units); return the figures of each, as `sft_steps`."""
    data, trainer, settings = read_preferences(path), worker.trainers["preference"], UnitLoss(**loss)
    before = trainer.skipped
    steps = [update_on_preferences(trainer, data, index_U, budget, settings, learning_rate) for index_U in batches]
    return {"steps": steps, "skipped_steps": trainer.skipped - before}


def preference_measure(worker: Worker, path: str, budget: int, loss: dict[str, Any]) -> dict[str, Any]:
    """The same figures over all units of a file, without a step."""
    return measure_preferences(worker.trainers["preference"], read_preferences(path), budget, UnitLoss(**loss))


def preference_end(worker: Worker, folder: str) -> dict[str, Any]:
    """Write the model as a Hugging Face folder and free it."""
    return _end(worker, "preference", folder)


def _end(worker: Worker, role: str, folder: str) -> dict[str, Any]:
    write_model(worker.lm, Path(folder), worker.rank)
    worker.trainers.pop(role).close()
    worker.lm, worker.sft_rows = None, None
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {}


COMMANDS = {
    function.__name__: function
    for function in (
        sft_begin,
        sft_steps,
        sft_end,
        preference_begin,
        preference_steps,
        preference_measure,
        preference_end,
    )
}
