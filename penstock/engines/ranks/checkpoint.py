"""Writes a rank's trained state to a file or to memory of its host, goes on from either, and exports the actor.

A state that all ranks hold is written once: each writes its part.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from penstock.engines.commands.checkpoint import Export, Load, LoadSnapshot, Save, TakeSnapshot
from penstock.engines.models.loading import write_model
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.reference import refreshed_reference, restore_reference
from penstock.engines.ranks.reshard import bring_weights
from penstock.engines.ranks.serving.handlers import carries_out, trains_nothing
from penstock.engines.training.slot_writer import SlotWriter
from penstock.engines.training.start import generator_states, restore_generators
from penstock.engines.training.state_images import SavedStates, StateImage, image_paths, write_image
from penstock.state.state_image import image_name

_log = logging.getLogger(__name__)

REFERENCE = "reference/"

# Among the ranks of this machine. Read before vLLM starts, which puts those of its own engine in their place.
LOCAL_RANK, NEIGHBOURS = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@carries_out(Save, during_generation=trains_nothing)
def save(models: RankModels, command: Save) -> None:
    """Write this rank's share of the models, and its generators; every rank does."""
    name = image_name(os.environ["PENSTOCK_GROUP"], models.rank)
    write_image(state_image(models), Path(command.folder) / name)


@carries_out(TakeSnapshot)
def take_snapshot(models: RankModels, command: TakeSnapshot) -> None:
    """Begin to copy this rank's share of the models, and its generators."""
    if models.slots is None:
        models.slots = SlotWriter(models.device)
    models.slots.begin(state_image(models, of=command.of, number=command.number), command.path)


def state_image(models: RankModels, **values: Any) -> StateImage:
    """Return all that a rank needs to go on, beside the models from which it starts, and further values."""
    tensors: dict[str, torch.Tensor] = {}
    trained: dict[str, Any] = {}
    for name, trainer in models.trainers.items():
        state = trainer.trained_state(LOCAL_RANK, NEIGHBOURS)
        tensors |= {f"{name}/{one}": tensor for one, tensor in state.tensors.items()}
        trained[name] = state.values
    if LOCAL_RANK == 0:
        tensors |= {REFERENCE + name: tensor for name, tensor in refreshed_reference(models).items()}
    own = {"group": os.environ["PENSTOCK_GROUP"], "rank": models.rank, "generators": generator_states()}
    return StateImage(tensors, own | values | {"trained": trained})


@carries_out(Load, during_generation=trains_nothing)
def load(models: RankModels, command: Load) -> None:
    """Go on from a checkpoint; a rollout engine in a group of its own gets its weights by a reshard afterwards."""
    restore(models, SavedStates(image_paths(Path(command.folder))), command.version)


@carries_out(LoadSnapshot)
def load_snapshot(models: RankModels, command: LoadSnapshot) -> None:
    """Likewise, from memory."""
    began = time.perf_counter()
    restore(models, SavedStates([Path(path) for path in command.paths]), command.version)
    _log.info("going on from a snapshot: %.1f s", time.perf_counter() - began)


def restore(models: RankModels, saved: SavedStates, version: int) -> None:
    """Go on from saved states; every rank does."""
    for name, trainer in models.trainers.items():
        trainer.restore(saved.trained(name))
    restore_generators(saved.generators(os.environ["PENSTOCK_GROUP"], models.rank))
    restore_reference(models, saved.tensors(REFERENCE))
    if models.generator is not None and "actor" in models.trainers:
        bring_weights(models, version)


@carries_out(Export)
def export(models: RankModels, command: Export) -> None:
    """Write the actor as a Hugging Face folder: all ranks gather, rank 0 writes."""
    write_model(models.lm, Path(command.folder), models.rank)
