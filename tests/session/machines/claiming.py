"""A process on a machine with four pretended GPUs that has some of them: what others are, to those tested here.

    python -m tests.session.machines.claiming NAME CONFIG [hosted FOLDER | turns COUNT FOLDER [unlocked]]

It says on lines of JSON what it waits for and which GPUs it has, and gives them back when its standard input ends.
`hosted`: the host of its ranks is there, too. `turns`: it takes and gives back so many times, and notes in the folder
what it has: exit code 3 where another has noted the same. `unlocked`: no lock is asked for, the control of that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pynvml

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.hosts import Hosts
from penstock.session.machines import claims
from penstock.session.machines.claims import Claims, claimed, wanted_by

GPUS = 4
PRETENDED = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetCount": lambda: GPUS,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
}


def main(name: str, given: str, doing: Sequence[str]) -> None:
    """Take GPUs, and give them back when told."""
    for question, answer in PRETENDED.items():
        setattr(pynvml, question, answer)
    claims.LOOK_S = 0.01
    config = TrainConfig(groups=json.loads(given))
    if doing[:1] == ["turns"]:
        _take_turns(config, name, int(doing[1]), Path(doing[2]), locked="unlocked" not in doing)
        return
    with ExitStack() as stack:
        found = stack.enter_context(claimed(wanted_by(config), name, lambda text: _say({"said": text})))
        if doing[:1] == ["hosted"]:
            hosts = stack.enter_context(Hosts(Path(doing[1]), kept=found.descriptors))
            hosts.start_local()
            hosts.wait_joined(60)
        _say({"has": _gpus(config, found)})
        sys.stdin.read()


def _take_turns(config: TrainConfig, name: str, count: int, folder: Path, locked: bool) -> None:
    if not locked:
        claims.fcntl.flock = lambda *_: None  # type: ignore[attr-defined]
    _say({"has": []})
    sys.stdin.read()  # all begin at once
    for _ in range(count):
        with claimed(wanted_by(config), name) as found:
            notes = [folder / str(gpu) for gpu in _gpus(config, found)]
            try:
                for note in notes:
                    note.touch(exist_ok=False)
            except FileExistsError:
                sys.exit(3)
            time.sleep(0.002)
            for note in notes:
                note.unlink()


def _gpus(config: TrainConfig, found: Claims) -> list[int]:
    return [*wanted_by(config).named, *(found.mine or ())]


def _say(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
