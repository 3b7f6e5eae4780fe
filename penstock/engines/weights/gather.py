"""The reshard from ZeRO-3's shards: all-gathers straight into vLLM's storage where it can hold a whole parameter.

Each rank keeps an equal range of every flattened parameter (the last one padded), as `parameter.ds_tensor`. Where vLLM
holds a parameter's rows side by side, the all-gather writes them there. Where it does not (an engine of several ranks,
matrices stacked already), whole parameters land in a bucket first, and the next bucket is gathered while slices of the
last one are copied.

The proof takes no second gather: each rank sums its own shard, the sums are exchanged once, and compared with the sums
of what arrived. Experts that several ranks share out (`actor.expert_parallel`) are gathered with the same proof.

Suffixes: `_P` parameters, `_PR` times ranks. Left out: which experts a rank has (experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.engines.weights.buckets import in_buckets, numels_of, one_ahead
from penstock.engines.weights.checksum import range_sums, word_sum
from penstock.engines.weights.copies import Copies, Differences, refuse, wrong_names
from penstock.engines.weights.experts import all_experts, cut_of, cut_parameters
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.slices import shapes_of

_ALIGNED = 8  # elements: every parameter of a bucket then begins at a whole word


@dataclass(frozen=True)
class Gathering:
    """Parameters on their way to `outputs`."""

    names: Sequence[str]
    outputs: Sequence[torch.Tensor]  # flat, whole
    _work: Any
    _padded: list[tuple[torch.Tensor, torch.Tensor]]
    _shards: list[torch.Tensor]  # copies of those in host memory have to live until all is there

    def finish(self) -> None:
        """Let the device's current stream wait until the outputs hold the parameters."""
        if self._work is not None:
            self._work.wait()
        for output, staged in self._padded:
            output.copy_(staged[: output.numel()])


class Shards:
    """The trainer's parameters under ZeRO-3, and the proof of what was gathered from them."""

    def __init__(self, lm: nn.Module) -> None:
        self._parameters: dict[str, Any] = dict(lm.named_parameters())
        self._found: dict[str, torch.Tensor] = {}  # sums of what arrived, by parameter
        world: Any = torch.distributed.group.WORLD
        self._group, self._rank, self._ranks = world, world.rank(), world.size()

    def empty(self) -> torch.Tensor:
        """Return an empty tensor of the shards' dtype and device."""
        parameter = next(iter(self._parameters.values()))
        return parameter.ds_tensor.new_empty(0, device=parameter.device)

    def gather(self, names: Sequence[str], outputs: Sequence[torch.Tensor]) -> Gathering:
        """Begin to gather parameters into flat outputs of their size; every rank calls it alike.

        Small ones that DeepSpeed keeps whole on every rank are copied.
        """
        whole, shards, padded = [], [], []
        for name, output in zip(names, outputs, strict=True):
            parameter = self._parameters[name]
            if parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":
                output.copy_(parameter.data.view(-1))
                continue
            size = parameter.ds_tensor.numel() * self._ranks
            if size == output.numel():
                whole.append(output)
            else:
                whole.append(output.new_empty(size))
                padded.append((output, whole[-1]))
            shards.append(self._shard(parameter))
        work = self._group.allgather_into_tensor_coalesced(whole, shards) if shards else None
        return Gathering(names, outputs, work, padded, shards)

    def look_at(self, gathering: Gathering) -> None:
        """Sum what arrived, a sum for each shard that it should come from."""
        for name, output in zip(gathering.names, gathering.outputs, strict=True):
            size = self._parameters[name].ds_tensor.numel()
            self._found[name] = range_sums(output, size, self._ranks)

    def differences(self) -> Differences:
        """Compare all that was looked at since the last call with its shards; every rank calls it."""
        found, self._found = self._found, {}
        return _unlike(found, [self._own_sum(self._parameters[name]) for name in found], self._ranks, None)

    def _own_sum(self, parameter: Any) -> torch.Tensor:
        size = parameter.ds_tensor.numel()
        filled = min(max(parameter.ds_numel - self._rank * size, 0), size)
        return word_sum(self._shard(parameter)[:filled])

    def _shard(self, parameter: Any) -> torch.Tensor:
        """Return this rank's part on the device, also of weights that live in host memory (`actor.offload`)."""
        shard: torch.Tensor = parameter.ds_tensor.to(parameter.device, non_blocking=True)
        return shard


class ExpertShards:
    """Experts that lie on several ranks, gathered a parameter at a time, and the proof of what was gathered."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = cut_parameters(module)
        self._found: dict[str, torch.Tensor] = {}  # sums of what arrived, one of each rank, by parameter

    def gather(self, name: str) -> torch.Tensor:
        """Return the experts of all ranks, and remember the sums of what arrived."""
        parameter = self.parameters[name]
        whole = all_experts(parameter)
        self._found[name] = range_sums(whole.view(-1), parameter.numel(), whole.numel() // parameter.numel())
        return whole

    def differences(self) -> Differences:
        """Compare all that was gathered since the last call with what each rank holds; all ranks call it."""
        found, self._found = self._found, {}
        if not found:
            return Differences([], [])
        cut = cut_of(self.parameters[next(iter(found))])
        assert cut is not None
        own = [word_sum(self.parameters[name].data.view(-1)) for name in found]
        return _unlike(found, own, cut.ranks.count, cut.ranks.group)


def _unlike(found: Mapping[str, torch.Tensor], own: Sequence[torch.Tensor], ranks: int, group: Any) -> Differences:
    """Compare sums of what arrived, one of each rank by parameter, with what each rank has of them itself."""
    own_P = torch.stack(list(own))
    all_RP = own_P.new_empty(ranks * len(own))
    torch.distributed.all_gather_into_tensor(all_RP, own_P, group=group)
    found_PR = torch.stack(list(found.values()))
    return Differences(list(found), list((found_PR != all_RP.view(ranks, -1).t()).any(1).unbind()))


class GatherReshard:
    """Buckets of the trainer's sharded parameters and where they go in vLLM's storage, laid down once.

    Args:
        model: vLLM's.
        lm: the trainer's model.
    """

    def __init__(self, model: Any, binding: Binding, lm: nn.Module) -> None:
        self._shapes = shapes_of(lm)
        self._copies, self._shards = Copies(model, binding, self._shapes), Shards(lm)
        self._numels = numels_of(self._shapes)
        self._direct = {name: view for name in self._numels if (view := self._copies.whole_view(name)) is not None}
        dtype = next(lm.parameters()).dtype
        self._bytes = sum(self._numels.values()) * dtype.itemsize
        self._buckets = in_buckets(self._numels, dtype.itemsize)
        self._empty = self._shards.empty()

    @torch.no_grad()
    def __call__(self) -> int:
        """Make the actor's weights the rollout engine's on this rank; return the bytes that arrived.

        Raises:
            RuntimeError: a parameter is not the actor's afterwards.
        """
        refuse(self._copies.moved())
        found = []
        for gathering in one_ahead(self._gatherings()):
            gathering.finish()
            self._shards.look_at(gathering)
            found.append(self._copies.copy(self._staged(gathering)))
        self._copies.check_complete(found, proven_otherwise=len(self._direct))
        refuse(wrong_names([*found, self._shards.differences()]))
        return self._bytes

    def _gatherings(self) -> Iterator[Gathering]:
        for bucket in self._buckets:
            staged = [name for name in bucket if name not in self._direct]
            outputs = self._direct | staging(self._empty, {name: self._numels[name] for name in staged}, _ALIGNED)
            yield self._shards.gather(bucket, [outputs[name] for name in bucket])

    def _staged(self, gathering: Gathering) -> dict[str, torch.Tensor]:
        pairs = zip(gathering.names, gathering.outputs, strict=True)
        return {name: output.view(self._shapes[name]) for name, output in pairs if name not in self._direct}


def staging(like: torch.Tensor, numels: Mapping[str, int], aligned: int = 1) -> dict[str, torch.Tensor]:
    """Return flat views of one fresh buffer, one after the other, each beginning at a multiple of `aligned`."""
    offsets, end = {}, 0
    for name, numel in numels.items():
        offsets[name] = end
        end += -(-numel // aligned) * aligned
    buffer = like.new_empty(end)
    return {name: buffer[offset : offset + numels[name]] for name, offset in offsets.items()}
