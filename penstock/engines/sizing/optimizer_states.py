"""What an optimizer keeps of a model's trained parameters, from the model's sizes alone.

Left out: the step counts. Of a mixture of experts it is a little too much: its router counts as AdamW's under Muon, and
under Adafactor gate and up of an expert, which are one matrix, as two.
"""

from __future__ import annotations

from penstock.configs.sections.optimizer import BLOCK_8BIT
from penstock.configs.sections.trainer import TrainerConfig
from penstock.engines.families.shape import ModelShape

NUMBER = 4  # bytes: masters and states are float32


def master_bytes(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return the bytes of the float32 masters of what is trained."""
    return NUMBER * shape.trained_parameters(trainer.lora)


def state_bytes(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return the bytes of what the optimizer keeps besides."""
    if trainer.optimizer.name == "adamw8bit":  # norms and biases, which stay float32, are too few to count
        trained = shape.trained_parameters(trainer.lora)
        return 2 * (trained + NUMBER * -(-trained // BLOCK_8BIT))
    return NUMBER * state_numbers(trainer, shape)


def state_numbers(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return the float32 numbers that an optimizer of such keeps besides the masters, on all ranks together."""
    optimizer, trained = trainer.optimizer, shape.trained_parameters(trainer.lora)
    if optimizer.name == "sgd":
        return trained if optimizer.momentum else 0
    if optimizer.name == "adafactor":
        return _factored(shape)
    if optimizer.name == "muon":
        return 2 * trained - sum(
            layers * rows * columns for layers, kind in shape.kinds for rows, columns in kind.values()
        )
    return 2 * trained


def _factored(shape: ModelShape) -> int:
    """Return the rows and columns of all matrices, and the numbers of norms and biases, which have none."""
    named = sum(layers * (rows + columns) for layers, kind in shape.kinds for rows, columns in kind.values())
    mixtures, hidden = 0, shape.hidden_size
    if (experts := shape.experts) is not None:
        mixtures = shape.mixtures * 3 * experts.count * (experts.inner + hidden)
    besides = max(0, shape.parameters - shape.block_matrices)
    embeddings, vectors = divmod(besides, shape.vocabulary * shape.hidden_size)  # a head of its own is another
    return named + mixtures + embeddings * (shape.vocabulary + shape.hidden_size) + vectors
