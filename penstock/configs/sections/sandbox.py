"""Section of a sandbox: what a user's code, and code that models wrote, may use while it runs (docs/rewards.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.configs.tree.section import PositiveInt, Section
from penstock.usercode.sandbox import Sandbox


class SandboxConfig(Section):
    """Limits of one worker process and of all that it starts; bubblewrap keeps them."""

    memory_gib: float = Field(4.0, gt=0, description="memory of a worker process with all that it starts, GiB")
    processes: PositiveInt = Field(64, description="processes that a worker is together with all that it starts")
    network: bool = Field(False, description="whether the code has the machine's network")
    read: list[str] = Field(
        default_factory=list, description="files and folders that it may read besides the working folder and Python's"
    )
    variables: list[str] = Field(
        default_factory=list, description="names of environment variables that it gets, such as one with an API key"
    )

    def of_run(self, hidden: Path | None = None, log: Path | None = None) -> Sandbox:
        """Return the sandbox for a worker of a run.

        Args:
            hidden: the run folder, of which nothing is seen.
            log: file that gets what the code prints, if it opens one.
        """
        return Sandbox(**self.model_dump(), hidden=hidden, log=log)
