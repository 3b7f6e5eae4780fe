"""Snapshots: the trained state after an iteration or step, in memory that outlives the ranks (slots.py of the groups).

A snapshot counts once every rank of every group that trains has finished it. Each rank has two slots, so the newest one
that counts is never written over, nor one that is being copied to files (checkpoints.py).

Left out: sending the commands (`Session.take_snapshot` and `load_snapshot`), and when to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.configs.schema import TrainConfig
from penstock.engines.commands.checkpoint import LoadSnapshot, TakeSnapshot
from penstock.engines.commands.hosts import SlotFacts, TellSlots
from penstock.engines.commands.message import Command
from penstock.engines.groups.group import EngineGroup
from penstock.engines.groups.hosts import REPLY_S

Of = Literal["iteration", "step"]  # what snapshots are counted by
Named = tuple[Of, int]
TRAINED = frozenset({"actor", "critic"})


@dataclass(frozen=True)
class RankSlots:
    """The slots of one rank, on its host."""

    group: EngineGroup
    rank: int
    slots: list[SlotFacts] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Name of the host."""
        return self.group.spec.devices[self.rank].host

    def holding(self, of: Of, number: int) -> SlotFacts | None:
        """Return the slot that holds a snapshot."""
        return next((slot for slot in self.slots if (slot.of, slot.number) == (of, number)), None)

    def free(self, kept: tuple[Of, int | None]) -> str:
        """Return the slot that the rank may write to: not the one of the snapshot that is kept."""
        return next(slot.path for slot in self.slots if slot.number is None or (slot.of, slot.number) != kept)


def trained_groups(config: TrainConfig, groups: Sequence[EngineGroup]) -> list[EngineGroup]:
    """Return the groups whose ranks hold what training changes."""
    kl = config.algorithm.kl
    changed = TRAINED | ({"reference"} if kl is not None and kl.refresh_every is not None else set())
    return [group for group in groups if changed.intersection(group.spec.roles)]


def slots_of(groups: Sequence[EngineGroup]) -> list[RankSlots]:
    """Return the slots of every rank of some groups, group by group in rank order.

    Raises:
        HostFailed: a host is lost.
    """
    found = {(group, rank): RankSlots(group, rank) for group in groups for rank in range(len(group.spec.devices))}
    named = {group.spec.name: group for group in groups}
    asked = {host: group.hosts.begin(host, TellSlots()) for group in groups for host in group.spec.hosts}
    for host, reply in asked.items():
        for slot in reply.result(REPLY_S):
            of = named.get(slot.group)
            if of is not None and of.spec.devices[slot.rank].host == host:
                found[of, slot.rank].slots.append(slot)
    return list(found.values())


@dataclass
class KnownSlots:
    """What the flow knows of its ranks' slots without asking their hosts, which a snapshot would wait for.

    A snapshot that was begun is whole once each of its groups has answered a command that waits for it. So the slots
    are known in an iteration with an update; hosts are asked for the first snapshot, and after a loss.

    Attributes:
        ranks: slots as the last snapshot leaves them once it is whole; empty: there was none.
        unsure: groups that have answered no such command since it was begun.
    """

    ranks: Sequence[RankSlots] = ()
    unsure: set[EngineGroup] = field(default_factory=set)

    def slots_of(self, groups: Sequence[EngineGroup]) -> Sequence[RankSlots]:
        """Return the slots of every rank of the groups that train.

        Raises:
            HostFailed: a host is lost that had to be asked.
        """
        return self.ranks if self.ranks and not self.unsure else slots_of(groups)

    def begun(self, ranks: Sequence[RankSlots], commands: Mapping[EngineGroup, Sequence[TakeSnapshot]]) -> None:
        """Note a snapshot that every rank copies now."""
        into = {command.path: command for one in commands.values() for command in one}
        self.ranks = [
            replace(one, slots=[_as_copied(slot, into[slot.path]) if slot.path in into else slot for slot in one.slots])
            for one in ranks
        ]
        self.unsure = set(commands)

    def heard(self, kind: type[Command[Any]], groups: Collection[EngineGroup]) -> None:
        """Note that all ranks of some groups have answered a command."""
        if kind.changes_state:
            self.unsure.difference_update(groups)

    def forget(self) -> None:
        """Know nothing: ranks or hosts are others now."""
        self.ranks, self.unsure = (), set()


def _as_copied(slot: SlotFacts, command: TakeSnapshot) -> SlotFacts:
    return replace(slot, of=command.of, number=command.number)


def newest_whole(ranks: Sequence[RankSlots], of: Of, at_most: int | None = None) -> int | None:
    """Return the number of the newest snapshot, up to `at_most`, that all ranks have finished; None: there is none."""
    held = [{slot.number for slot in one.slots if slot.of == of and slot.number is not None} for one in ranks]
    common = set.intersection(*held) if held else set()
    return max((number for number in common if at_most is None or number <= at_most), default=None)


def snapshot_commands(
    ranks: Sequence[RankSlots], of: Of, number: int, being_written: Named | None
) -> dict[EngineGroup, list[TakeSnapshot]]:
    """Return what every rank is told to take a snapshot.

    Args:
        being_written: the snapshot that is being copied to files.
    """
    kept = being_written or (of, newest_whole(ranks, of, number - 1))  # later ones are of what is done again
    return {
        group: [TakeSnapshot(of, number, one.free(kept)) for one in ranks if one.group is group]
        for group in dict.fromkeys(one.group for one in ranks)
    }


def load_commands(
    ranks: Sequence[RankSlots], of: Of, number: int, version: int
) -> dict[EngineGroup, list[LoadSnapshot]]:
    """Return what every rank is told to go on from a snapshot that counts; it reads those of its whole host."""
    on_host: dict[str, list[str]] = {}
    for one in ranks:
        if (slot := one.holding(of, number)) is not None:
            on_host.setdefault(one.host, []).append(slot.path)
    return {
        group: [LoadSnapshot(on_host[one.host], version) for one in ranks if one.group is group]
        for group in dict.fromkeys(one.group for one in ranks)
    }
