"""Which GPU of this machine is whose.

A GPU has a file, and the training that has the GPU keeps it locked (flock). The lock belongs to the open file, which
the host of the training's ranks inherits: it ends once flow and host have ended, in whatever way, and the host ends
after its last rank. What a file says of its holder is for people. A training gets all GPUs that it asks for, or none
and waits. Who looks is alone with that (`TURN`), so two never each hold what the other waits for.

Left out: GPUs of other machines, which Prefect counts (admission.py); programs that are not ours; who waits longest.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pynvml
from rich.console import Console

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import gpu_uuid, visible_gpus
from penstock.engines.groups.placement import groups_of
from penstock.reports.progress import waiting

FOLDER = "PENSTOCK_GPU_CLAIMS"  # variable with the folder of the files
EVERYBODYS = "/tmp/penstock-gpus"  # not TMPDIR, of which a machine has several
TURN = "turn"  # the file of who looks
LOOK_S = 1.0  # between two looks
MOST_BYTES = 200  # of what is read of a holder


@dataclass(frozen=True)
class Wanted:
    """GPUs that are asked of this machine, by their places among the visible ones.

    Attributes:
        named: these.
        more: so many besides, whichever are free; None: all that are free.
        multiple: divides the number of all that are free.
    """

    named: tuple[int, ...] = ()
    more: int | None = 0
    multiple: int = 1

    def __str__(self) -> str:
        count, least = (self.multiple, " at least") if self.more is None else (self.more, "")
        more = f"{count} {'GPU' if count == 1 else 'GPUs'}{least}" if count else ""
        return " and ".join(filter(None, (_named(self.named) if self.named else "", more)))

    def of(self, free: Collection[int]) -> tuple[int, ...] | None:
        """Return the GPUs that one gets besides those that it names, or None where it has to wait."""
        others = tuple(gpu for gpu in free if gpu not in self.named)
        most = len(others) - len(others) % self.multiple
        count = most if self.more is None else self.more
        if not set(free).issuperset(self.named) or count > most or (self.more is None and not count):
            return None
        return others[:count]


@dataclass(frozen=True)
class Claims:
    """GPUs of this machine that a training has.

    Attributes:
        mine: those that its groups do not name; None: they name all, or use none of this machine.
        descriptors: of the locked files. The GPUs are the training's until nobody keeps one open.
    """

    mine: tuple[int, ...] | None = None
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What a training would get now.

    Attributes:
        mine: as of `Claims`.
        others: GPUs that others have, where it would have to wait.
        text: the same in words.
    """

    mine: tuple[int, ...] | None = None
    others: frozenset[int] = frozenset()
    text: str = ""


def wanted_by(config: TrainConfig) -> Wanted:
    """Return the GPUs that the groups of a training ask of this machine; none of one without GPUs."""
    here = [group for group in groups_of(config).values() if not group.hosts]
    if not visible_gpus():
        return Wanted()
    named = tuple(gpu for group in here for gpu in group.gpus or ())
    takes_all = [group for group in here if group.gpus is None and group.ranks is None]
    if not takes_all:
        return Wanted(named, sum(group.ranks or 0 for group in here))
    generates = any("rollout" in group.roles for group in takes_all)
    return Wanted(named, None, config.rollout.tensor_parallel if generates else 1)


@contextmanager
def claimed(wanted: Wanted, who: str, say: Callable[[str], object] = lambda _: None) -> Iterator[Claims]:
    """Have GPUs of this machine until the context ends and nobody else keeps their descriptors; waits for them.

    Args:
        who: what others are told of who has them.
        say: told what is waited for, and what was got.

    Raises:
        UserError: nobody can write which GPU is whose.
    """
    with ExitStack() as kept:
        found = _asked(wanted, who, kept)
        if not isinstance(found, Claims):
            text, said = f"waiting for {wanted} of this machine", ""
            with waiting(Console(), text):
                while not isinstance(found, Claims):
                    if (now := _said(found)) != said:  # others have them by now
                        say(f"{text}: {now}")
                        said = now
                    time.sleep(LOOK_S)
                    found = _asked(wanted, who, kept)
        if found.mine:
            say(f"on {_named(found.mine)} of this machine")
        yield found


def would_get(wanted: Wanted) -> Turn:
    """Return what a training would get now; nothing is kept.

    Raises:
        UserError: as of `claimed`.
    """
    places = _places(wanted)
    if not places:
        return Turn()
    with _looking(places) as (free, held):
        mine = wanted.of(free.keys())
    others = f" ({_said(held)})" if held else ""
    if mine is None:
        return Turn(others=frozenset(held), text=f"GPUs: it would wait for {wanted}{others}")
    text = f"GPUs: {', '.join(map(str, (*wanted.named, *mine)))} of this machine, free now{others}"
    return Turn(mine if wanted.more != 0 else None, text=text)


def holders(places: Mapping[int, str]) -> dict[int, str]:
    """Return who has which of some GPUs, given by UUID; those that nobody has are left out.

    Raises:
        UserError: as of `claimed`.
    """
    if not _folder().exists():
        return {}
    with _looking(places) as (_, held):
        return held


def _asked(wanted: Wanted, who: str, kept: ExitStack) -> Claims | Mapping[int, str]:
    """Take all GPUs that are wanted, which `kept` gives back, or none; return who has which then."""
    places = _places(wanted)
    if not places:
        return Claims()
    with _looking(places) as (free, held):
        if (mine := wanted.of(free.keys())) is None:
            return held
        descriptors = [_lasting(_folder())]
        kept.callback(os.close, descriptors[0])
        for gpu in (*wanted.named, *mine):
            descriptors.append(os.dup(free[gpu]))  # the same open file: locked until both are closed
            kept.callback(os.close, descriptors[-1])
            with suppress(OSError):  # a disk that is full: the lock is what counts
                os.ftruncate(free[gpu], 0)
                os.pwrite(free[gpu], f"{who} (process {os.getpid()})".encode(), 0)
    return Claims(mine if wanted.more != 0 else None, tuple(descriptors))


def _places(wanted: Wanted) -> dict[int, str]:
    """Return the UUIDs of all GPUs that come into question, by their places."""
    visible = visible_gpus() if wanted.named or wanted.more != 0 else []
    found = dict[int, str]()
    for at, gpu in enumerate(visible):
        if at in wanted.named:
            found[at] = gpu_uuid(gpu)
        elif wanted.more != 0:
            with suppress(pynvml.NVMLError):  # one that has left the bus is nobody's
                found[at] = gpu_uuid(gpu)
    return found


@contextmanager
def _looking(places: Mapping[int, str]) -> Iterator[tuple[dict[int, int], dict[int, str]]]:
    """Look alone at some GPUs; yields locked descriptors of those that nobody has, and who has the others."""
    with ExitStack() as stack:
        try:
            found = _locked(places, stack)
        except OSError as error:
            raise UserError(
                f"who has which GPU of this machine cannot be looked up in {_folder()}: {error.strerror}",
                f"let {FOLDER} name a folder in which every user of these GPUs may write, the same one for all",
            ) from error
        yield found


def _locked(places: Mapping[int, str], stack: ExitStack) -> tuple[dict[int, int], dict[int, str]]:
    folder = _folder()
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)
    _lock(folder / TURN, stack, fcntl.LOCK_EX)
    free, held = dict[int, int](), dict[int, str]()
    for at, uuid in places.items():
        descriptor, is_free = _lock(folder / uuid, stack, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_free:
            free[at] = descriptor
        else:
            said = os.pread(descriptor, MOST_BYTES, 0).decode(errors="replace")
            held[at] = "".join(filter(str.isprintable, said)) or "another process"
    return free, held


def _lock(path: Path, stack: ExitStack, how: int) -> tuple[int, bool]:
    """Open a file until the stack ends; return its descriptor, and whether it is locked."""
    while True:
        stack.callback(os.close, descriptor := _opened(path))
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            return descriptor, False
        if os.fstat(descriptor).st_nlink:  # else whoever tidies up has removed it meanwhile
            return descriptor, True


def _opened(path: Path) -> int:
    """Open a file that is every user's, who makes it or not."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the mask
        return descriptor
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW)


def _lasting(folder: Path) -> int:
    """Return a descriptor that keeps systemd-tmpfiles, which removes what is old, from a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _folder() -> Path:
    return Path(os.environ.get(FOLDER) or EVERYBODYS)


def _said(held: Mapping[int, str]) -> str:
    """Say who has which GPUs, each holder once."""
    of: dict[str, list[int]] = {}
    for gpu, holder in held.items():
        of.setdefault(holder, []).append(gpu)
    return ", ".join(f"{holder} has {_named(gpus)}" for holder, gpus in of.items())


def _named(gpus: Sequence[int]) -> str:
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(map(str, gpus))}"
