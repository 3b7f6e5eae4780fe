"""A taskset of verifiers whose tasks have a tool, which a server of their own offers."""

from __future__ import annotations

from collections.abc import Iterator

from verifiers import v1 as vf

__all__ = ["Products"]


class Multiplier(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


class Product(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("391" in trace.last_reply)

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Multiplier(vf.ToolsetConfig())]


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self) -> Iterator[Product]:
        yield Product(vf.TaskData(prompt="What is 17 times 23?", system_prompt="Use the tool."), self.config.task)


if __name__ == "__main__":
    Multiplier.run()
