"""The section `data.agents`: which agent a prompt is for, where each agent has a critic of its own (ippo)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from configs.section import Section

AgentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # part of a checkpoint's path


class AgentsConfig(Section):
    """Agents that share the policy and learn their values apart."""

    column: str = Field(min_length=1, description="data column that names the agent of a row")
    names: list[AgentName] = Field(min_length=1, description="the column's values, one agent each; numbers as text")

    @model_validator(mode="after")
    def _once(self) -> Self:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"'names' has '{twice[0]}' twice: remove one")
        return self


def check_agents(agents: AgentsConfig | None, needed: bool, algorithm: str) -> None:
    """Check that agents are given exactly where the algorithm tells them apart.

    Raises:
        ValueError: they are missing, or have no effect.
    """
    if needed and agents is None:
        raise ValueError(f"algorithm '{algorithm}' needs 'data.agents': the data column that names a row's agent")
    if agents is not None and not needed:
        raise ValueError(f"'data.agents' has no effect with algorithm '{algorithm}', which has one critic or none")
