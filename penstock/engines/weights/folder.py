"""The weights of a model folder in a rollout engine that no trainer is beside: read once, copied, and proven.

An engine of one rank keeps its weights in a flat buffer, as a rollout group of a training does, and vLLM reads them
there: so the same weights lie the same way, and give the same responses. An engine of several ranks takes its slices of
each parameter, one at a time, so that no GPU ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.engines.weights.checksum import differs
from penstock.engines.weights.copies import Copies, Differences, refuse, wrong_names
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.slices import shapes_of


class FolderLoad:
    """Reads a folder into the rollout engine of this rank.

    Args:
        model: vLLM's.
        read: returns the Hugging Face model of the folder, on the CPU.
        storage: the flat buffer that vLLM's parameters are views of, by Hugging Face parameter; empty if they are not.
    """

    def __init__(
        self, model: Any, binding: Binding, read: Callable[[], Any], storage: Mapping[str, torch.Tensor]
    ) -> None:
        self._model, self._binding, self._read, self._storage = model, binding, read, storage

    @torch.no_grad()
    def __call__(self) -> int:
        """Make the folder's weights the engine's on this rank; return their bytes.

        Raises:
            RuntimeError: a parameter is not the folder's afterwards.
        """
        lm = self._read()
        copies = Copies(self._model, self._binding, shapes_of(lm))
        refuse(copies.moved())
        device, named = next(self._model.parameters()).device, dict(lm.named_parameters())
        stored: list[Differences] = []
        copied: list[Differences] = []
        for name in shapes_of(lm):
            whole = named[name].data.to(device)
            if (place := self._storage.get(name)) is not None:
                place.copy_(whole)
                stored.append(Differences([name], [differs(place, whole)], whole.numel() * whole.element_size()))
            if name in copies.parts:
                copied.append(copies.copy({name: whole}))
        copies.check_complete(copied)
        refuse(wrong_names([*stored, *copied]))
        return sum(part.bytes for part in (*stored, *copied))
