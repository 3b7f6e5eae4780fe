"""The folder of a chain: what was asked for, and what each of its stages leaves.

    chain.yaml     the chain, every recipe that it names read already
    NAME/          a run folder of the stage of that name        NAME.jsonl    or the file that it has selected
    flow_run.txt   which flow run is at it (penstock/session/flow_runs/taken_over.py)

What is asked for is written once, before the first stage begins, so a resume does what is left of the same. Whether a
stage is done its own folder says. Left out: reading it (penstock/session/chains/plan.py), which takes the whole
configuration, and hosts know trackers, which know this folder; doing it (penstock/flows/chain.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.state.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.configs.chain import Stage


@dataclass(frozen=True)
class ChainFolder:
    """Paths of a chain. Creating the object touches nothing on disk."""

    path: Path

    @property
    def chain(self) -> Path:
        """What was asked for."""
        return self.path / "chain.yaml"

    def run(self, stage: Stage) -> RunFolder:
        """The run folder of a stage that trains."""
        return RunFolder(self.path / stage.name)

    def left_by(self, stage: Stage) -> Path:
        """What later stages get of a stage: its model, or its file."""
        if stage.selects:
            return self.path / f"{stage.name}.jsonl"
        return self.run(stage).model("sft" if stage.does == "sft" else "final")


def is_chain(folder: Path) -> bool:
    """Whether a directory of run folders is that of a chain."""
    return ChainFolder(folder).chain.is_file()
