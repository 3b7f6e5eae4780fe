"""The reshard where the trainer keeps whole parameters in this process (ZeRO 0 to 2): strategies `shared` and `local`.

What could be bound to the trainer's storage is current already, which its addresses prove. The rest (this rank's part
of matrices that an engine of several ranks cuts, vocabularies that vLLM pads) is copied from the trainer's parameters
on this rank, without communication, and compared bit for bit. Weights with adapters are merged for the copy, one at a
time: the base stays as it is, and the rollout engine's copy is its own. Experts that lie on several ranks are gathered
for it, a parameter at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.engines.weights.copies import Copies, refuse, wrong_names
from penstock.engines.weights.gather import ExpertShards
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.lora import adapted_layers
from penstock.engines.weights.slices import shapes_of


class LocalReshard:
    """Addresses of what is shared and copies of what is not, both laid down once.

    Args:
        model: vLLM's.
        lm: the trainer's, its parameters at their final addresses.
    """

    def __init__(self, model: Any, binding: Binding, lm: nn.Module) -> None:
        self._copies = Copies(model, binding, shapes_of(lm))
        self._ours, theirs = dict(lm.named_parameters()), dict(model.named_parameters())
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._ours.items()}
        self._users: dict[str, list[str]] = {}
        for item in (*binding.shared, *binding.copied):
            for piece in item.slices:
                self._users.setdefault(piece.part, []).append(item.name)
        needed, adapted = self._copies.parts, adapted_layers(lm)
        self._adapted = {name: layer for name, layer in adapted.items() if name in needed}
        self._experts = ExpertShards(lm)
        wholes = needed - adapted.keys() - self._experts.parameters.keys()
        self._wholes = {name: parameter.data for name, parameter in self._ours.items() if name in wholes}
        for item in binding.shared:
            first = item.slices[0].of(self._ours[item.slices[0].part].data)
            if theirs[item.name].data_ptr() != first.data_ptr():
                raise RuntimeError(f"vLLM moved {item.name} away from the actor's storage while it started")

    @torch.no_grad()
    def __call__(self) -> int:
        """Make the actor's weights the rollout engine's on this rank; return the bytes copied.

        Raises:
            RuntimeError: a parameter is not the actor's afterwards.
        """
        refuse(self.moved())
        found = [self._copies.copy(self._wholes)]
        found += (self._copies.copy({name: layer.merged()}) for name, layer in self._adapted.items())
        found += (self._copies.copy({name: self._experts.gather(name)}) for name in self._experts.parameters)
        self._copies.check_complete(found)
        refuse(wrong_names([*found, self._experts.differences()]))
        return sum(part.bytes for part in found)

    def moved(self) -> list[str]:
        """Return vLLM's parameters that no longer lie where they were bound, or whose source in the trainer moved.

        Any part of a fused matrix may have moved alone.
        """
        gone = [name for name, address in self._addresses.items() if self._ours[name].data_ptr() != address]
        return self._copies.moved() + [user for name in gone for user in self._users.get(name, (name,))]
