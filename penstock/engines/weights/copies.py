"""Whole Hugging Face parameters into vLLM's own storage: the copies of one rank, and what they prove.

Shared by the strategies that have whole parameters at hand, be it in the trainer or in a bucket just received.
Left out: where the whole parameters come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engines.weights.checksum import differs
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.slices import Shapes, Slice


@dataclass(frozen=True)
class Target:
    """A slice and the view of vLLM's parameter that it goes to."""

    name: str
    piece: Slice
    view: torch.Tensor


class Copies:
    """Where the slices of each Hugging Face parameter go in this rank's vLLM parameters.

    Args:
        model: vLLM's, as it serves requests.
        shapes: whole shapes of the Hugging Face parameters.
    """

    def __init__(self, model: Any, binding: Binding, shapes: Shapes) -> None:
        self._shapes = shapes
        self._parameters = dict(model.named_parameters())
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}
        self.targets: dict[str, list[Target]] = {}
        for item in binding.copied:
            for piece in item.slices:
                target = Target(item.name, piece, piece.within(self._parameters[item.name].data))
                self.targets.setdefault(piece.part, []).append(target)
        self._count = sum(len(targets) for targets in self.targets.values())

    @property
    def parts(self) -> set[str]:
        """Hugging Face parameters that are needed whole."""
        return set(self.targets)

    def whole_view(self, part: str) -> torch.Tensor | None:
        """Return the flat view of vLLM's storage that holds all of a Hugging Face parameter; None if there is none."""
        targets = self.targets.get(part, [])
        if len(targets) != 1:
            return None
        target = targets[0]
        if target.piece.transposed:
            return None
        complete = target.piece.source == 0 and target.piece.length == self._shapes[part][target.piece.dim]
        return target.view.view(-1) if complete and target.view.is_contiguous() else None

    def moved(self) -> list[str]:
        """Return vLLM's parameters that no longer lie where they were bound: CUDA graphs read the old address."""
        return [name for name, address in self._addresses.items() if self._parameters[name].data_ptr() != address]

    def copy(self, wholes: Mapping[str, torch.Tensor]) -> Differences:
        """Copy every slice of these parameters, without waiting for the device; return what to look at later."""
        copied = [(target, wholes[part]) for part in wholes for target in self.targets.get(part, ())]
        views = [target.view for target, _ in copied]
        sources = [target.piece.of(whole).to(target.view.dtype) for target, whole in copied]
        if views:
            torch._foreach_copy_(views, sources)
        return Differences(
            names=[target.name for target, _ in copied],
            flags=[differs(view, source) for view, source in zip(views, sources, strict=True)],
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in views),
        )

    def check_complete(self, found: Iterable[Differences], proven_otherwise: int = 0) -> None:
        """Raise unless every slice was compared.

        Args:
            found: the comparisons of this reshard.
            proven_otherwise: slices that were never copied, and whose values are proven in another way.

        Raises:
            RuntimeError: one was not.
        """
        compared = sum(len(part.names) for part in found) + proven_otherwise
        if compared != self._count:
            raise RuntimeError(f"the reshard compared {compared} of {self._count} slices of the rollout engine")


@dataclass(frozen=True)
class Differences:
    """A flag on the device for each name: whether what was written differs from its source."""

    names: list[str]
    flags: list[torch.Tensor]
    bytes: int = 0  # written


def wrong_names(found: Iterable[Differences]) -> list[str]:
    """Return the names whose flag is set. The one place where a reshard waits for the device."""
    names, flags = [], []
    for differences in found:
        names += differences.names
        flags += [flag.reshape(()) for flag in differences.flags]
    if not flags:
        return []
    return [name for name, flag in zip(names, torch.stack(flags).tolist(), strict=True) if flag]


def refuse(wrong: Iterable[str]) -> None:
    """Raise if any rollout parameter is not the actor's.

    Raises:
        RuntimeError: one is not.
    """
    if names := list(dict.fromkeys(wrong)):
        raise RuntimeError(
            f"after the reshard {len(names)} rollout parameters are not the actor's: {', '.join(names[:5])}"
        )
