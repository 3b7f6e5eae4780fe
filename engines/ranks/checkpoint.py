"""Writes a rank's models to folders, and reads them back."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engines.commands.checkpoint import Export, Load, Save
from engines.models.loading import write_model
from engines.ranks.models import RankModels
from engines.ranks.reference import load_reference, save_reference
from engines.ranks.reshard import bring_weights
from engines.ranks.serving.handlers import carries_out
from engines.training.start import generator_states, restore_generators
from engines.training.state_files import read_state


@carries_out(Save)
def save(models: RankModels, command: Save) -> None:
    """Write this rank's share of the models, and its generators; every rank does."""
    folder = Path(command.folder)
    for role, trainer in models.trainers.items():
        trainer.save(folder / role)
    save_reference(models, folder)
    torch.save(generator_states(), _generators(models, folder))


@carries_out(Load)
def load(models: RankModels, command: Load) -> None:
    """Read the models back; a rollout engine in a group of its own gets its weights by a reshard afterwards."""
    folder = Path(command.folder)
    for role, trainer in models.trainers.items():
        trainer.load(folder / role)
    restore_generators(read_state(_generators(models, folder)))
    load_reference(models, folder)
    if models.generator is not None and "actor" in models.trainers:
        bring_weights(models, command.version)


def _generators(models: RankModels, folder: Path) -> Path:
    return folder / f"random-{os.environ['PENSTOCK_GROUP']}-{models.rank}.pt"


@carries_out(Export)
def export(models: RankModels, command: Export) -> None:
    """Write the actor as a Hugging Face folder: all ranks gather, rank 0 writes."""
    write_model(models.lm, Path(command.folder), models.rank)
