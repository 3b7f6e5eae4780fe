"""The commands of offline training: on responses to imitate, on preferences, on scores.

Each loads one model, takes its steps, and writes it as a Hugging Face folder; the rank then holds nothing of it.

Left out: what a step is (penstock/engines/training/updates.py, penstock/engines/training/preference.py), and which rows
it takes (penstock/tasks/).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import SftConfig
from penstock.engines.batches.packing import Rows, read_rows
from penstock.engines.commands.build import Kernels
from penstock.engines.commands.finetuning import (
    ModelToTrain,
    PreferenceBegin,
    PreferenceEnd,
    PreferenceMeasure,
    PreferenceMeasured,
    PreferenceSteps,
    SftBegin,
    SftEnd,
    SftSteps,
    Step,
    Stepped,
)
from penstock.engines.families.shape import read_shape
from penstock.engines.kernels.attention_kernel import kernels_on
from penstock.engines.models.loading import start_reward_model, write_model
from penstock.engines.models.models import PackedPolicy, PackedRewardModel
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out
from penstock.engines.training.preference import (
    measure_preferences,
    read_preferences,
    rows_of_units,
    rows_together,
    update_on_preferences,
)
from penstock.engines.training.trainer import Trainer
from penstock.engines.training.updates import update_supervised
from penstock.engines.weights.layout import ordered_parameters

Trained = Literal["sft", "preference"]  # by which name a rank keeps the model
REMEDY = "look for odd rows in the data, or lower the learning rate, and begin anew"  # where gradients are not finite


def _settings(models: RankModels, asked: ModelToTrain) -> SftConfig:
    """Give the rank what it needs to know of the configuration; return the model's section."""
    data = {"images": "images"} if asked.train_encoder else {}  # rows have some, else there is nothing to train
    models.configure(TrainConfig.model_validate({"model": asked.of_model, "data": data, "seed": asked.seed}))
    return SftConfig.model_validate(asked.trainer)


def _train(models: RankModels, name: Trained, module: nn.Module, settings: SftConfig) -> None:
    models.trainers[name] = Trainer(module, ordered_parameters(models.lm), settings, settings.steps, REMEDY)


@carries_out(SftBegin)
def sft_begin(models: RankModels, command: SftBegin) -> None:
    """Load the model into DeepSpeed, and all rows."""
    settings = _settings(models, command.model)
    models.lm = models.causal_lm(command.model.folder, settings)
    models.see(command.images, command.model.folder)
    _train(models, "sft", PackedPolicy(models.lm, command.model.keep_logits, images=models.images), settings)
    models.sft_rows = read_rows(command.rows)


@carries_out(SftSteps)
def sft_steps(models: RankModels, command: SftSteps) -> Stepped:
    """Take the steps one after the other."""
    rows, trainer = models.sft_rows, models.trainers["sft"]
    assert rows is not None

    def step(index_B: np.ndarray) -> dict[str, float]:
        figures = update_supervised(trainer, rows, index_B, command.budget, command.learning_rate)
        return {name: figures[name] for name in ("loss", "grad_norm", "learning_rate")}

    return _stepped(models, trainer, command.batches, step, rows)


@carries_out(SftEnd)
def sft_end(models: RankModels, command: SftEnd) -> None:
    """Write the model and free it."""
    _end(models, "sft", command.folder)


@carries_out(PreferenceBegin)
def preference_begin(models: RankModels, command: PreferenceBegin) -> Kernels:
    """Load the policy or the reward model into DeepSpeed."""
    settings, folder = _settings(models, command.model), command.model.folder
    module: nn.Module
    if command.scores:
        recomputes, code = bool(settings.gradient_checkpointing), models.config.model.code
        classifier = start_reward_model(folder, models.dtype, recomputes, code)
        models.lm = models.to_train(classifier, settings)
        module = PackedRewardModel(models.lm)
    else:
        models.lm = models.causal_lm(folder, settings)
        module = PackedPolicy(models.lm, command.model.keep_logits)
    _train(models, "preference", module, settings)
    models.shapes["preference"] = read_shape(Path(folder))
    return kernels_on(models.device.type, models.needs_flex(folder))


@carries_out(PreferenceSteps)
def preference_steps(models: RankModels, command: PreferenceSteps) -> Stepped:
    """Take the steps one after the other."""
    data, trainer = read_preferences(command.path), models.trainers["preference"]

    def step(index_U: np.ndarray) -> dict[str, float]:
        return update_on_preferences(trainer, data, index_U, command.budget, command.loss, command.learning_rate)

    return _stepped(models, trainer, command.batches, step, data.rows, rows_together(command.loss))


def _stepped(
    models: RankModels,
    trainer: Trainer,
    batches: np.ndarray,
    step: Callable[[np.ndarray], dict[str, float]],
    rows: Rows,
    together: int = 1,
) -> Stepped:
    """Take a step for each batch and tell of it, since a command of many steps may take minutes.

    Args:
        together: rows of a unit, of which the batches hold numbers.
    """
    taken, lengths_B = list[dict[str, float]](), rows.lengths_B
    for index_U in batches:
        skipped, began_s = trainer.skipped, time.perf_counter()
        figures = step(index_U)
        seconds, tokens = time.perf_counter() - began_s, float(lengths_B[rows_of_units(index_U, together)].sum())
        skips = float(trainer.skipped - skipped)
        taken.append(figures | {"tokens": tokens, "tokens_per_s": tokens / seconds, "skipped_steps": skips})
        if models.rank == 0:
            models.newest.tell(Step(taken[-1]))
    return Stepped(taken)


@carries_out(PreferenceMeasure)
def preference_measure(models: RankModels, command: PreferenceMeasure) -> PreferenceMeasured:
    """Measure all units once, without a step."""
    trainer, data = models.trainers["preference"], read_preferences(command.path)
    return PreferenceMeasured(measure_preferences(trainer, data, command.budget, command.loss))


@carries_out(PreferenceEnd)
def preference_end(models: RankModels, command: PreferenceEnd) -> None:
    """Write the model and free it."""
    _end(models, "preference", command.folder)


def _end(models: RankModels, name: Trained, folder: str) -> None:
    write_model(models.lm, Path(folder), models.rank)
    models.trainers.pop(name).close()
    models.lm, models.sft_rows = None, None
    gc.collect()
    if models.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
