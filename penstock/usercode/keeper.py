"""The parent of one process that runs users' code: when its own parent or that process ends, nothing of it is left.

    python -I -S keeper.py PARENT [session] DESCRIPTOR,... COMMAND

(The words of COMMAND are one, with US between them: a list of processes shows it once.)

Whatever the command starts and does not wait for, in a session of its own, forked twice or with an empty environment,
comes back to this process: Linux gives orphans to the nearest ancestor that asks for them (PR_SET_CHILD_SUBREAPER).
So when the command ends, in whatever way, all that still descends from this process is killed; and when PARENT ends,
also by SIGKILL, the command with it. Then this process ends as the command did. SIGTERM ends all of it at once.

Why not a process group: a child leaves it by a system call. Why not a token in the environment: a child may clear it,
and somebody has to look for it. Why not a PID namespace or a control group: many containers allow neither.

The command's number goes to the first descriptor. Imports little, since it starts with every worker. Left out: SIGKILL
of this process itself, which ends the command (PR_SET_PDEATHSIG) and sets free what the command has started.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BETWEEN = "\x1f"
PATIENCE_S = 10.0  # with processes that a driver or another user keeps alive
LOOK_S = 0.005
HEARD = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM}


def main() -> None:
    """Start the command, wait for an end, leave nothing, and end likewise."""
    parent, session, command = int(sys.argv[1]), "session" in sys.argv[2:-2], sys.argv[-1].split(BETWEEN)
    descriptors = [int(number) for number in sys.argv[-2].split(",")]
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    keeper, kept = os.getpid(), os.fork()
    if not kept:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        if session:
            os.setsid()
        os.close(descriptors[0])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.execv(command[0], command)
    if os.getsid(0) != keeper:
        os.setsid()  # a signal to the group of the command, or to the terminal's, is not for this process
    os.write(descriptors[0], b"%d" % kept)
    for descriptor in descriptors:
        os.close(descriptor)
    while os.getppid() == parent:  # the death of a thread that started this process is heard as well
        number = signal.sigwait(HEARD)
        if number == signal.SIGTERM or (number == signal.SIGCHLD and reap(kept)):
            break
    leave(kept)


def reap(kept: int) -> bool:
    """Collect the processes that have ended; return whether the command has. Its number is kept until the end."""
    try:
        while status := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if status.si_pid == kept:
                return True
            os.waitpid(status.si_pid, 0)
    except ChildProcessError:
        pass  # none is left
    return False


def leave(kept: int) -> None:
    """Kill all that descends from this process, and end as the command did."""
    status, deadline = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for pid in descendants():
            try:  # noqa: SIM105 - contextlib is one more import
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended, or is another user's
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == kept else status
        except ChildProcessError:
            break  # none is left: what was killed gave its own children to this process
        time.sleep(LOOK_S)
    end_likewise(os.waitstatus_to_exitcode(status))


def end_likewise(code: int) -> None:
    """End with an exit code, or where it is negative by the signal of that number."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own core dump is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def descendants() -> list[int]:
    """Return the processes below this one that run, the nearest first."""
    below: dict[int, list[tuple[int, str]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib imports longer than all else here
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:  # noqa: PTH123
                state, parent = stream.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        below.setdefault(int(parent), []).append((int(name), state.decode()))
    found, level = [], [os.getpid()]
    while level:
        children = [child for pid in level for child in below.get(pid, ())]
        found += [pid for pid, state in children if state not in "ZX"]
        level = [pid for pid, _ in children]
    return found


if __name__ == "__main__":
    main()
