"""Images of a rank's trained state (penstock/state/state_image.py), written from living tensors and read by slices.

What is read need not have been written by as many ranks, nor at the same ZeRO stage: a rank looks for each slice of a
parameter that it holds in all images, and copies what overlaps.

Nothing of an image is executed. Left out: which tensors a trained state has
(penstock/engines/training/trained_state.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from penstock.base.errors import UserError
from penstock.engines.training.optimizers import STEP
from penstock.engines.training.trained_state import MASTER, ParameterSlice, Share
from penstock.state.state_image import IMAGES, Header, Plan, plan_image, read_header

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 26  # bytes copied from a device at once
WRAPPER = "lm."  # what PackedPolicy calls the model inside it
REMEDY = "go on from another checkpoint: --resume RUN --from ITERATION"


@dataclass(frozen=True)
class StateImage:
    """What an image is to hold: tensors on any device, and values for JSON."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def plan(self) -> Plan:
        """Lay it out."""
        tensors = ((name, NAMES[one.dtype], tuple(one.shape)) for name, one in self.tensors.items())
        return plan_image(tensors, self.values)


def write_image(image: StateImage, path: Path) -> None:
    """Write an image to a file, some MiB at a time."""
    plan = image.plan()
    with path.open("wb") as file:
        file.write(plan.header)
        for tensor in image.tensors.values():
            _write(tensor, file)


def _write(tensor: torch.Tensor, file: BinaryIO) -> None:
    words = tensor.detach().reshape(-1).view(torch.uint8)
    for chunk in words.split(CHUNK):
        file.write(memoryview(chunk.cpu().numpy()))


def image_paths(folder: Path) -> list[Path]:
    """Return the images in a checkpoint's folder."""
    return sorted(folder.glob(IMAGES))


class Image:
    """An image to read: its tensors are mapped, so that only what is copied is read.

    Raises:
        UserError: it is none.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        if header is None:
            raise UserError(f"{path} is not finished", REMEDY)
        self.path, self.header = path, header
        self._bytes = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a view of the mapped file, or a copy where it begins at an odd place (behind U8)."""
        place = self.header.places[name]
        dtype, found = DTYPES[place.dtype], self._bytes[place.begin : place.end]
        return (found.clone() if place.begin % dtype.itemsize else found).view(dtype).view(place.shape)


@dataclass(frozen=True)
class _Source:
    """A range of a parameter in an image: elements from `start` to `end`, in flat tensors from `offset` on."""

    start: int
    end: int
    offset: int
    image: Image
    share: str  # name of its tensors


@dataclass(frozen=True)
class SavedState:
    """A trained model's state in images of any number of ranks.

    Attributes:
        steps: that its trainer has taken.
        frozen_sum: of the frozen weights beside it (penstock/engines/weights/lora.py).
        parameters: shapes of the trained parameters by name.
        tied: other names of some of them.
        dtype: of the weights.
    """

    steps: int
    frozen_sum: int
    parameters: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    dtype: torch.dtype
    sources: dict[str, list[_Source]]

    def check_parameters(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Compare the parameters with those of a model.

        Raises:
            UserError: it has others, or others are trained.
        """
        if self.parameters != wanted:
            names = [name for name in wanted | self.parameters if wanted.get(name) != self.parameters.get(name)]
            raise UserError(
                f"the checkpoint does not fit the model: {', '.join(names[:5])}", "resume with the run's own model"
            )

    def copy(self, kind: str, slices: Sequence[ParameterSlice], flat: torch.Tensor) -> None:
        """Copy the slices of the masters, or of a state of their layout, into a flat tensor.

        Raises:
            UserError: the images lack some of it.
        """
        for part in slices:
            for source, begin, end in self._overlaps(part):
                saved = source.image.tensor(f"{source.share}/{kind}").view(-1)
                target = flat[part.offset + begin - part.start : part.offset + end - part.start]
                target.copy_(saved[source.offset + begin - source.start : source.offset + end - source.start])

    def copy_state(self, name: str, share: Share, state: torch.Tensor) -> None:
        """Copy what was saved of an optimizer's state of a share; see `copy`.

        What is not of the master's layout belongs to a whole parameter (Adafactor's sums over rows and columns).
        """
        if name == STEP:
            state.fill_(self.optimizer_steps(share))
        elif state.numel() == share.master.numel():
            self.copy(name, share.slices, state.data.view(-1))
        else:
            (source, *_) = self.sources[share.slices[0].parameter]
            state.copy_(source.image.tensor(f"{source.share}/{name}"))

    def optimizer_steps(self, share: Share) -> float:
        """Return how many steps the optimizer has taken on a share's parameters."""
        sources = {
            (source.image.path, source.share): source for part in share.slices for source, *_ in self._overlaps(part)
        }
        return max((float(one.image.tensor(f"{one.share}/{STEP}")) for one in sources.values()), default=0.0)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights whole, in the dtype in which they were trained; tied ones under each name, one storage."""
        weights = {}
        for name, shape in self.parameters.items():
            flat = torch.empty(math.prod(shape))
            self.copy(MASTER, [ParameterSlice(name, 0, flat.numel(), 0)], flat)
            weights[name] = flat.view(shape).to(self.dtype)
        return weights | {name: weights[twin] for name, twin in self.tied.items()}

    def _overlaps(self, part: ParameterSlice) -> Iterator[tuple[_Source, int, int]]:
        """Yield where a slice is: sources, and from where to where in the parameter."""
        at, last = part.start, part.start + part.count
        for source in self.sources.get(part.parameter, ()):
            if source.start <= at < min(last, source.end):
                end = min(last, source.end)
                yield source, at, end
                at = end
        if at < last:
            raise UserError(f"the checkpoint lacks a part of {part.parameter}: a rank's file is missing", REMEDY)


class SavedStates:
    """The images of all ranks, as one.

    Raises:
        UserError: there are none, or one is none of ours.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.images = [Image(path) for path in paths]

    def trained(self, name: str) -> SavedState:
        """Return the state of a trained model.

        Raises:
            UserError: there is none.
        """
        held = [
            (image, image.header.values["trained"][name]) for image in self.images if name in _trained(image.header)
        ]
        if not held:
            raise UserError(f"the checkpoint holds no trained state of '{name}'", "resume with the run's own roles")
        first = held[0][1]
        sources: dict[str, list[_Source]] = {}
        for image, values in held:
            for share, slices in values["shares"].items():
                for parameter, start, count, offset in slices:
                    found = _Source(start, start + count, offset, image, f"{name}/{share}")
                    sources.setdefault(parameter, []).append(found)
        for ranges in sources.values():
            ranges.sort(key=lambda source: source.start)
        return SavedState(
            steps=first["steps"],
            frozen_sum=first["frozen_sum"],
            parameters={parameter: tuple(shape) for parameter, shape in first["parameters"].items()},
            tied=first["tied"],
            dtype=getattr(torch, first["dtype"]),
            sources=sources,
        )

    def generators(self, group: str, rank: int) -> dict[str, Any]:
        """Return the generators of a rank; of one that there was not, those of one that there was."""
        by_rank = {(one.header.values["group"], one.header.values["rank"]): one for one in self.images}
        image = by_rank.get((group, rank), self.images[rank % len(self.images)])
        found: dict[str, Any] = image.header.values["generators"]
        return found

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin so, by the rest of their names."""
        return {
            name.removeprefix(prefix): image.tensor(name)
            for image in self.images
            for name in image.header.places
            if name.startswith(prefix)
        }


def _trained(header: Header) -> dict[str, Any]:
    trained: dict[str, Any] = header.values["trained"]
    return trained


def read_causal_lm_weights(state: SavedState) -> dict[str, torch.Tensor]:
    """Return the weights of a policy by their Hugging Face names; of one with adapters the adapters alone."""
    return {name.removeprefix(WRAPPER): value for name, value in state.weights().items() if name.startswith(WRAPPER)}


def saved_actor(folder: Path) -> SavedState:
    """Return the actor's state in a checkpoint, read without an engine.

    Raises:
        UserError: the folder holds none.
    """
    if not (paths := image_paths(folder)):
        raise UserError(f"{folder} holds no trained state", "name a run whose checkpoint is whole")
    return SavedStates(paths).trained("actor")
