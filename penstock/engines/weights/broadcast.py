"""The reshard to rollout engines on other devices: buckets of the flat buffer, broadcast and proven in one command.

The trainer's first rank sends. At ZeRO 0 to 2 its buckets are pieces of the flat buffer that DeepSpeed keeps anyway; at
ZeRO-3 the trainer's ranks gather each bucket first, while the last one is on its way. A rollout engine of one rank
keeps its weights in a flat buffer of the same order, so a bucket lands where vLLM reads it; an engine of several ranks
takes its slices out of a bucket while the next one arrives.

The sender's checksum of each bucket comes last. Every receiver compares it with its own, and the number of differences
goes back to all, so that either both sides know the version to be verified or both fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.engines.weights.buckets import in_buckets, numels_of, one_ahead
from penstock.engines.weights.checksum import word_sum
from penstock.engines.weights.copies import Copies, Differences, refuse, wrong_names
from penstock.engines.weights.experts import cut_parameters
from penstock.engines.weights.gather import ExpertShards, Gathering, Shards, staging
from penstock.engines.weights.joint import Joint
from penstock.engines.weights.layout import fused_view
from penstock.engines.weights.loader import Binding
from penstock.engines.weights.lora import adapted_layers
from penstock.engines.weights.slices import shapes_of


class FlatSource:
    """Buckets of a trainer that holds whole parameters: views of its flat buffer, laid down once.

    A bucket with adapted weights is packed anew each time, from the merged weights; one with experts that lie on
    several ranks from what these gather.
    """

    def __init__(self, lm: nn.Module, buckets: Sequence[tuple[str, ...]]) -> None:
        self._parameters = dict(lm.named_parameters())
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}
        self._adapted, self._experts = adapted_layers(lm), ExpertShards(lm)
        elsewhere = self._adapted.keys() | self._experts.parameters.keys()
        parts = [[self._parameters[name].data.view(-1) for name in bucket] for bucket in buckets]
        packed = [not elsewhere.isdisjoint(bucket) for bucket in buckets]
        views = [None if anew else fused_view(bucket) for anew, bucket in zip(packed, parts, strict=True)]
        self._buckets = list(zip(buckets, views, strict=True))

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket; parameters that do not lie next to each other are packed into one."""
        moved = [name for name, address in self._addresses.items() if self._parameters[name].data_ptr() != address]
        if moved:
            raise RuntimeError(f"the actor's parameters moved: {', '.join(moved[:5])}")
        for names, view in self._buckets:
            yield torch.cat([self._whole(name).view(-1) for name in names]) if view is None else view

    def _whole(self, name: str) -> torch.Tensor:
        if name in self._experts.parameters:
            return self._experts.gather(name)
        return self._adapted[name].merged() if name in self._adapted else self._parameters[name].data

    def differences(self) -> Differences:
        """Compare experts that were gathered with what each rank holds; nothing else can be wrong yet."""
        return self._experts.differences()


class ShardedSource:
    """Buckets of a trainer at ZeRO-3, gathered one ahead of the one in use."""

    def __init__(self, lm: nn.Module, buckets: Sequence[tuple[str, ...]]) -> None:
        self._shards, self._buckets, self._numels = Shards(lm), buckets, numels_of(shapes_of(lm))
        self._empty = self._shards.empty()

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket whole; every rank of the trainer goes through them."""
        for gathering, bucket in one_ahead(self._gatherings()):
            gathering.finish()
            self._shards.look_at(gathering)
            yield bucket

    def _gatherings(self) -> Iterator[tuple[Gathering, torch.Tensor]]:
        for names in self._buckets:
            views = staging(self._empty, {name: self._numels[name] for name in names})
            bucket = fused_view(list(views.values()))
            assert bucket is not None
            yield self._shards.gather(names, list(views.values())), bucket

    def differences(self) -> Differences:
        """Compare what was gathered with its shards; every rank of the trainer calls it."""
        return self._shards.differences()


class Sender:
    """The actor's side. Ranks without a joint group only take part in gathering."""

    def __init__(self, lm: nn.Module, joint: Joint | None) -> None:
        self._joint, sharded = joint, hasattr(next(lm.parameters()), "ds_id")
        self._numels, dtype = numels_of(shapes_of(lm)), next(lm.parameters()).dtype
        buckets = in_buckets(self._numels, dtype.itemsize)
        self._source = ShardedSource(lm, buckets) if sharded else FlatSource(lm, buckets)
        self._gathers = sharded or bool(cut_parameters(lm))
        self._bytes = sum(self._numels.values()) * dtype.itemsize

    @torch.no_grad()
    def __call__(self) -> int:
        """Send the actor's weights; return the bytes sent by this rank.

        Raises:
            RuntimeError: a receiver does not hold them afterwards.
        """
        if self._joint is None:
            if self._gathers:
                for _ in self._source.buckets():
                    pass
                refuse(wrong_names([self._source.differences()]))
            return 0
        sums = []
        for work, bucket in one_ahead((self._joint.broadcast(bucket), bucket) for bucket in self._source.buckets()):
            sums.append(word_sum(bucket))
            work.wait()
        self._joint.broadcast(torch.stack(sums)).wait()
        verdict(self._joint, [self._source.differences()], sums[0])
        return self._bytes


class Receiver:
    """The rollout engine's side on one rank.

    Args:
        model: vLLM's.
        lm: the trained model's shapes.
        storage: the flat buffer that vLLM's parameters are views of, by Hugging Face parameter; empty if they are not.
    """

    def __init__(
        self, model: Any, binding: Binding, lm: nn.Module, storage: Mapping[str, torch.Tensor], joint: Joint
    ) -> None:
        self._joint, self._storage, self._shapes = joint, storage, shapes_of(lm)
        self._copies, self._numels = Copies(model, binding, self._shapes), numels_of(self._shapes)
        first = next(model.parameters())
        self._empty = torch.empty(0, dtype=first.dtype, device=first.device)
        self._buckets = in_buckets(self._numels, first.dtype.itemsize)
        self._bytes = sum(self._numels.values()) * first.dtype.itemsize

    @torch.no_grad()
    def __call__(self) -> int:
        """Receive the actor's weights; return their bytes.

        Raises:
            RuntimeError: they are not the actor's, here or on another rank.
        """
        refuse(self._copies.moved())
        sums, found = [], []
        for work, bucket, wholes in one_ahead(self._arrivals()):
            work.wait()
            sums.append(word_sum(bucket))
            found.append(self._copies.copy(wholes))
        self._copies.check_complete(found)
        received = torch.stack(sums)
        sent = torch.empty_like(received)
        self._joint.broadcast(sent).wait()
        arrived = Differences([f"{names[0]} ff." for names in self._buckets], list((sent != received).unbind()))
        verdict(self._joint, [arrived, *found], received)
        return self._bytes

    def _arrivals(self) -> Iterator[tuple[Any, torch.Tensor, dict[str, torch.Tensor]]]:
        for names in self._buckets:
            if self._storage:
                flat = {name: self._storage[name].view(-1) for name in names}
            else:
                flat = staging(self._empty, {name: self._numels[name] for name in names})
            bucket = fused_view(list(flat.values()))
            assert bucket is not None
            wholes = {name: flat[name].view(self._shapes[name]) for name in names if name in self._copies.parts}
            yield self._joint.broadcast(bucket), bucket, wholes


def verdict(joint: Joint, found: Sequence[Differences], like: torch.Tensor) -> None:
    """Tell all ranks of the joint group how many checks failed here, and raise if one failed on any rank.

    Raises:
        RuntimeError: the weights of some rank are not the actor's.
    """
    wrong = wrong_names(found)
    total = joint.total(torch.tensor([len(wrong)], dtype=torch.int64, device=like.device))
    refuse(wrong)
    if everywhere := int(total.item()):
        raise RuntimeError(f"after the reshard {everywhere} checksums differ on other ranks: the version is not valid")
