"""The folder of a chain: what was asked for, and what each of its stages leaves.

    chain.yaml     the chain, every recipe that it names read already
    NAME/          a run folder of the stage of that name        NAME.jsonl    or the file that it has selected

What is asked for is written once, before the first stage begins, so a resume does what is left of the same. Whether a
stage is done its own folder says. Left out: doing it (flows/chain.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.chain import SELECT, Chain, Stage, read_chain
from penstock.base.errors import UserError
from penstock.state.run_folder import RunFolder


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
        if stage.does == SELECT:
            return self.path / f"{stage.name}.jsonl"
        return self.run(stage).model("sft" if stage.does == "sft" else "final")


def read_chain_of(folder: ChainFolder) -> Chain:
    """Return what was asked for.

    Raises:
        UserError: there is no chain, or its file was changed.
    """
    if not folder.chain.is_file():
        raise UserError(f"{folder.path} holds no chain (no chain.yaml in it)", "name the folder that a chain printed")
    return read_chain(folder.chain)


def is_chain(folder: Path) -> bool:
    """Whether a directory of run folders is that of a chain."""
    return ChainFolder(folder).chain.is_file()
