"""What a process that runs users' code, or code that a model wrote, may see and use: a sandbox that bubblewrap makes.

Inside are the system, Python, what it can import, the working folder and what the recipe adds, all read-only; a /tmp of
its own; few variables of the environment; no network, no capabilities, no other process. The kernel's namespaces see to
that, and bubblewrap (`bwrap`) arranges them without privileges; nothing of it is ours.

No namespace limits memory, and many containers offer no control group. So each process has limits of its own (`limit`),
and the worker outside looks at the sum over the sandbox (sandboxed.py). Left out: memory that no process has mapped
(descriptors of `memfd_create`), which nothing but a control group counts; that a training of root's lets the code
change the modes of /dev/null and its like; time, which the pools limit (workers.py).
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from penstock.base.errors import UserError
from penstock.usercode.imports import VARIABLE

PROGRAM = "bwrap"
INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap), and allow user namespaces in the container"
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts"),
    *("/etc/resolv.conf", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/alternatives", "/etc/mime.types"),
)  # of /etc what libraries ask for, and no secrets
KEPT_VARIABLES = (
    *("PATH", "LANG", "LC_ALL", "TZ", "PYTHONHASHSEED", "LD_LIBRARY_PATH", VARIABLE),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)
GIB = 1 << 30
FILES_SHARE = 4  # /tmp and /dev/shm are memory: each holds this part of `memory_gib`
TRIAL_S = 30.0
NEEDED = "needs_sandbox"  # attribute of a class or function that runs what a model writes

Function = TypeVar("Function", bound=Callable[..., object])


def needs_sandbox(function: Function) -> Function:
    """Mark a function that runs what a model writes: without a sandbox it is refused."""
    setattr(function, NEEDED, True)
    return function


def check_boxed(named: str, thing: object, key: str, sandbox: object) -> None:
    """Refuse what runs a model's code where there is no sandbox.

    Args:
        named: the setting and the name, for the message.
        key: that configures the sandbox.

    Raises:
        UserError: it needs one, and `sandbox` is None.
    """
    if getattr(thing, NEEDED, False) and sandbox is None:
        raise UserError(
            f"{named} runs what the model writes, and there is no sandbox",
            f"add {key}={{}}; docs/rewards.md says what is in it",
        )


@dataclass(frozen=True)
class Sandbox:
    """A sandbox for one worker process and all that it starts.

    Attributes:
        memory_gib: of all its processes together.
        processes: at a time, threads not counted.
        network: whether it has the machine's network.
        read: further files and folders that are seen, read-only.
        variables: further variables of the environment that it gets.
        hidden: a folder of which nothing is seen, although it may lie in one that is.
        log: a file, also below `hidden`, that is there and may be written.
    """

    memory_gib: float = 4.0
    processes: int = 64
    network: bool = False
    read: Sequence[str] = ()
    variables: Sequence[str] = ()
    hidden: Path | None = None
    log: Path | None = None

    @property
    def memory_bytes(self) -> int:
        """Of all processes together."""
        return int(self.memory_gib * GIB)

    def environment(self) -> dict[str, str]:
        """Return the environment of what runs inside: nothing of it is a secret unless the recipe names it."""
        kept = {name: os.environ[name] for name in (*KEPT_VARIABLES, *self.variables) if name in os.environ}
        folders = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        return kept | {"PYTHONPATH": folders, "HOME": "/tmp", "TMPDIR": "/tmp"}

    def command(self, command: Sequence[str], told: int | None = None) -> list[str]:
        """Return the command that runs `command` inside; it ends with the thread that starts it.

        Args:
            told: descriptor to which bubblewrap writes the number of the sandbox's first process, as JSON.
        """
        files = ["--size", str(self.memory_bytes // FILES_SHARE), "--tmpfs"]
        words = [PROGRAM, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        words += ["--die-with-parent", "--new-session", *(["--share-net"] if self.network else [])]
        words += ["--info-fd", str(told)] if told is not None else []
        seen = _seen([*SYSTEM, *_of_python(), str(Path.cwd()), *self.read])
        own = ["--proc", "/proc", "--dev", "/dev", *files, "/dev/shm", *files, "/tmp"]
        words += [*seen, *own] if "/" in seen else [*own, *seen]  # what is seen may lie in /tmp
        words += ["--remount-ro", "/dev", "--remount-ro", "/proc"]  # root owns settings of the kernel there
        log = [] if self.log is None else ["--bind", str(self.log.resolve()), str(self.log.resolve())]
        hidden = None if self.hidden is None else self.hidden.resolve()
        if hidden is None or Path.cwd().is_relative_to(hidden):  # nothing could be imported from there
            words += log
        else:
            words += ["--tmpfs", str(hidden), *log, "--remount-ro", str(hidden)]
        return [*words, "--remount-ro", "/", "--chdir", str(Path.cwd()), "--", *command]

    def limit(self) -> None:
        """Limit this process, and each that it starts: memory, the size of a file, processes; no core dumps."""
        for what, most in (
            (resource.RLIMIT_DATA, self.memory_bytes),  # not RLIMIT_AS: libraries reserve addresses by the terabyte
            (resource.RLIMIT_FSIZE, self.memory_bytes // FILES_SHARE),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))


def check_sandbox(setting: str) -> None:
    """Check that this machine can make the sandbox that `setting` asks for.

    Raises:
        UserError: it cannot.
    """
    if why := obstacle():
        raise UserError(f"{setting}: no sandbox on this machine: {why}", f"{INSTALL}; or remove {setting}")


def obstacle() -> str:
    """Return why no sandbox can be made on this machine, nothing where one can: Python is started in one."""
    if shutil.which(PROGRAM) is None:
        return f"bubblewrap ({PROGRAM}) is not installed"
    sandbox = Sandbox()
    trial = [*sandbox.command([sys.executable, "-I", "-S", "-c", ""])]
    try:
        done = subprocess.run(trial, env=sandbox.environment(), capture_output=True, text=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        return f"{PROGRAM} does not end within {TRIAL_S:g} s"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{PROGRAM} ended with exit code {done.returncode}"


def _of_python() -> list[str]:
    """Return where this Python and all that it can import lie."""
    return [sys.executable, sys.prefix, sys.base_prefix, *filter(None, sys.path)]


def _seen(paths: Iterable[str]) -> list[str]:
    """Return bubblewrap's words for files and folders under their own names, also where links lead to them."""
    links: dict[Path, Path] = {}
    found: set[Path] = set()
    for path in filter(os.path.exists, paths):
        at, left = Path("/"), list(Path(path).absolute().parts)
        while left:
            at = at.parent if (part := left.pop(0)) == ".." else at / part
            if at.is_symlink():
                links[at] = at.readlink()
                at, left = at.parent, [*links[at].parts, *left]
        found.add(at)
    outer = sorted(path for path in found if not found & {*path.parents})
    words = [word for path in outer for word in ("--ro-bind", str(path), str(path))]
    for link, target in links.items():
        if not {*outer} & {*link.parents}:  # otherwise it is seen as it is
            words += ["--symlink", str(target), str(link)]
    return words
