"""A class whose public methods are the policy's tools, as TRL's `environment_factory` takes it, as an environment.

    class Shop:
        def reset(self, **row): ...            # the columns of the data row; returns a text for the prompt, or None
        def price_of(self, item: str): ...     # a tool: annotated, with a docstring in Google's style
        def get_reward(self) -> float: ...     # what the episode was worth, asked once at its end; may be left out

The chat template tells the policy of its tools and shows it what they returned (penstock/engines/rollout/chat.py). A
turn that calls none is the answer, after which the episode is over. What goes wrong in a tool is the policy's to read,
as a result: a name that no tool has, arguments that it does not take, an exception. Any method may be `async`.

Left out: finding the calls in a turn's text (penstock/engines/rollout/chat.py), deadlines and processes
(penstock/environments/worker.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import UserError
from penstock.environments.environment import Reward, Step, ToolCall

OTHERS = ("reset", "get_reward")  # public methods that are no tools
LONGEST_ERROR = 500  # characters of an exception that the policy reads


@dataclass(frozen=True)
class Failed:
    """What a call gave that went wrong, for the policy to read."""

    error: str


@dataclass(frozen=True)
class ToolEnvironment:
    """One episode with an object of such a class, none of whose methods is `async`."""

    played: Any

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Begin the episode; return what is put behind the prompt's last message."""
        text: str | None = self.played.reset(**_taken(self.played.reset, row, seed))
        return text

    def answer(self, calls: Sequence[ToolCall], last: bool) -> Step:
        """Call the tools that a turn asks for, one after the other.

        Args:
            last: whether the episode is over in any case.
        """
        results = [self._called(call) for call in calls]
        over = last or not calls
        return told(calls, results, over, self._reward() if over else None)

    def _called(self, call: ToolCall) -> object:
        try:
            return _tool(self.played, call)()
        except Exception as error:
            return _failed(error)

    def _reward(self) -> Reward:
        reward: Reward = self.played.get_reward() if hasattr(self.played, "get_reward") else None
        return reward


@dataclass(frozen=True)
class AsyncToolEnvironment:
    """The same where a method is `async`."""

    played: Any

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """As `ToolEnvironment.reset`."""
        text: str | None = await _value(self.played.reset(**_taken(self.played.reset, row, seed)))
        return text

    async def answer(self, calls: Sequence[ToolCall], last: bool) -> Step:
        """As `ToolEnvironment.answer`."""
        results = [await self._called(call) for call in calls]
        over = last or not calls
        return told(calls, results, over, await self._reward() if over else None)

    async def _called(self, call: ToolCall) -> object:
        try:
            return await _value(_tool(self.played, call)())
        except Exception as error:
            return _failed(error)

    async def _reward(self) -> Reward:
        reward: Reward = await _value(self.played.get_reward()) if hasattr(self.played, "get_reward") else None
        return reward


def has_tools(made: object) -> bool:
    """Whether an object is to be played by its tools: it has no `step`, or its `reset` does not take row and seed."""
    reset = getattr(made, "reset", None)
    if not callable(reset) or not tools_of(made):
        return False
    if not callable(getattr(made, "step", None)):
        return True
    try:
        inspect.signature(reset).bind({}, 0)
    except TypeError:
        return True
    return False


def with_tools(made: object) -> ToolEnvironment | AsyncToolEnvironment:
    """Return an episode that is played by the tools of `made`."""
    methods = [*tools_of(made).values(), *(getattr(made, name) for name in OTHERS if hasattr(made, name))]
    is_async = any(inspect.iscoroutinefunction(method) for method in methods)
    return AsyncToolEnvironment(made) if is_async else ToolEnvironment(made)


def tools_of(made: object) -> dict[str, Callable[..., object]]:
    """Return the tools of an object by name: the public methods of its class, in the order of their names."""
    found = inspect.getmembers(type(made), predicate=inspect.isfunction)
    return {name: getattr(made, name) for name, _ in found if not name.startswith("_") and name not in OTHERS}


def schemas_of(spec: str, made: object) -> list[dict[str, Any]]:
    """Return what a chat template is told of the tools: an OpenAI function for each, from annotations and docstrings.

    Args:
        spec: `module:Class`, for messages.
        made: an object of the class.

    Raises:
        UserError: a tool has no docstring, or an argument no annotation or description.
    """
    from transformers.utils import chat_template_utils as templates

    schemas = []
    for name, tool in tools_of(made).items():
        try:
            schemas.append(templates.get_json_schema(tool))
        except (templates.DocstringParsingException, templates.TypeHintParsingException) as error:
            raise UserError(
                f"environment.type '{spec}': its tool '{name}' cannot be described to the policy: {error}",
                "annotate every argument, and describe it in the docstring under 'Args:'; "
                f"a method that is no tool begins with an underscore{_meant_environment(made)}",
            ) from error
    return schemas


def _meant_environment(made: object) -> str:
    """Return what a class with `step` may lack: its methods count as tools where its `reset` takes something else."""
    has_step = callable(getattr(made, "step", None))
    return "; an environment with step(text), which this may be, needs reset(row, seed)" if has_step else ""


def _tool(played: object, call: ToolCall) -> Callable[[], object]:
    """Return a call ready to be made.

    Raises:
        ValueError: there is no such tool, or the arguments are no JSON object.
        TypeError: it does not take these arguments.
    """
    tool = tools_of(played).get(call.name)
    if tool is None:
        raise ValueError(f"there is no tool '{call.name}'")
    if call.arguments is None:
        raise ValueError("the arguments are no JSON object")
    bound = inspect.signature(tool).bind(**call.arguments)
    return lambda: tool(*bound.args, **bound.kwargs)


def told(calls: Sequence[ToolCall], results: Sequence[object], over: bool, reward: Reward) -> Step:
    """Return the step that tells the policy what its calls gave: each a `Failed`, a text, or what is shown as JSON.

    Args:
        results: of the first calls; an environment may be over before the last.
    """
    answered = zip(calls, map(_text, results), strict=False)
    messages = [{"role": "tool", "name": call.name, "content": text} for call, text in answered]
    failed = sum(isinstance(result, Failed) for result in results)
    return Step(messages=messages, failed_calls=failed, done=over, reward=reward)


def _text(result: object) -> str:
    shown = {"error": result.error} if isinstance(result, Failed) else result
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False, default=str)


def _failed(error: Exception) -> Failed:
    return Failed(f"{type(error).__name__}: {error}"[:LONGEST_ERROR])


def _taken(reset: Callable[..., object], row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of `reset`: the row's columns and `seed`, or those of them that it names."""
    parameters = inspect.signature(reset).parameters
    given = {**row, "seed": seed}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: given[name] for name in parameters if name in given}


async def _value(value: object) -> Any:
    return await value if inspect.isawaitable(value) else value
