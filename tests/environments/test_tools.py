"""A class whose methods are tools, as TRL takes it, runs unchanged; the policy reads what goes wrong in a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.environment import Step, ToolCall
from penstock.environments.loading import Tooled, is_async, load_environment, tools_told
from penstock.environments.pool import EnvironmentPool
from penstock.environments.tools import AsyncToolEnvironment, ToolEnvironment
from penstock.environments.worker import Call, Reply

ROW = {"a": 12, "b": 34, "question": "12 + 34?"}
RIGHT = ToolCall("add", {"a": 12, "b": 34})


def config_of(name: str, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type=f"tests.chat.environments:{name}", settings=settings)


def episode(name: str = "Sums", **settings: Any) -> Tooled:
    made = load_environment(config_of(name, **settings))()
    assert isinstance(made, Tooled)
    return made


def answered(made: Tooled, calls: list[ToolCall], last: bool = False) -> Step:
    if isinstance(made, ToolEnvironment):
        return made.answer(calls, last)
    return asyncio.run(made.answer(calls, last))


@pytest.mark.parametrize("name", ["Sums", "Slow"])
def test_calls_are_answered_in_their_order_until_a_turn_makes_none(name: str) -> None:
    """Results that are no text are JSON; the reward is asked for once, at the end."""
    made = episode(name)
    text = made.reset(ROW, 7)
    assert (text if isinstance(made, ToolEnvironment) else asyncio.run(text)) is None  # type: ignore[arg-type]
    step = answered(made, [ToolCall("look_up", {"name": "one"}), RIGHT])
    assert [(message["role"], message["name"], message["content"]) for message in step.messages] == [
        ("tool", "look_up", '{"one": 1}'),
        ("tool", "add", "46"),
    ]
    assert (step.done, step.reward) == (False, None)
    assert answered(made, []) == Step(done=True, reward=1.0)


def test_an_episode_that_is_cut_has_its_reward_too() -> None:
    """Its last turn's calls are made. Control: without them it is worth nothing."""
    made = episode()
    made.reset(ROW, 7)
    assert answered(made, [RIGHT], last=True).reward == 1.0
    made.reset(ROW, 7)
    assert answered(made, [], last=True).reward == 0.0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (ToolCall("subtract", {}), "ValueError: there is no tool 'subtract'"),
        (ToolCall("_no_tool", {}), "ValueError: there is no tool '_no_tool'"),
        (ToolCall("reset", {}), "ValueError: there is no tool 'reset'"),
        (ToolCall("add", None), "ValueError: the arguments are no JSON object"),
        (ToolCall("add", {"a": 1}), "TypeError: missing a required argument: 'b'"),
        (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "TypeError: got an unexpected keyword argument 'c'"),
        (ToolCall("look_up", {"name": "two"}), "KeyError: 'two'"),
    ],
)
@pytest.mark.parametrize("name", ["Sums", "Slow"])
def test_what_goes_wrong_in_a_tool_is_its_result(name: str, call: ToolCall, error: str) -> None:
    """And the episode goes on."""
    made = episode(name)
    if isinstance(made, ToolEnvironment):
        made.reset(ROW, 7)
    else:
        asyncio.run(made.reset(ROW, 7))
    step = answered(made, [call])
    assert json.loads(step.messages[0]["content"]) == {"error": error}
    assert not step.done


def test_reset_gets_what_it_names() -> None:
    """All columns and the seed where it takes any; without a `get_reward` there is no reward."""
    made = episode("Named")
    made.reset(ROW, 7)
    assert made.played.begun == (12, 7)
    assert answered(made, []) == Step(done=True, reward=None)
    everything = episode(note="Hurry.")
    assert everything.reset(ROW, 7) == "Hurry."
    assert everything.played.row == {**ROW, "seed": 7}


def test_the_template_is_told_of_public_methods() -> None:
    """In OpenAI's form, from annotations and docstrings; of our own interface and of none there are no tools."""
    told = tools_told(config_of("Sums"))
    assert told is not None
    assert [tool["function"]["name"] for tool in told] == ["add", "look_up"]
    assert told[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "description": "the second"},
        },
        "required": ["a", "b"],
    }
    assert tools_told(config_of("Ours")) is None and tools_told(None) is None


def test_one_method_that_is_async_is_enough() -> None:
    assert (is_async(episode("Sums")), is_async(episode("Slow"))) == (False, True)
    assert isinstance(episode("Slow"), AsyncToolEnvironment)


def test_refusals() -> None:
    """Before anything starts: a tool that the policy cannot be told of, a parser where there are no tools."""
    with pytest.raises(UserError, match=r"its tool 'add' cannot be described to the policy.*argument 'a'"):
        tools_told(config_of("Undescribed"))
    with pytest.raises(UserError, match=r"its tool 'step' cannot(.|\n)*needs reset\(row, seed\)"):
        tools_told(config_of("BareReset"))
    ours = EnvironmentConfig(type="tests.chat.environments:Ours", tool_parser="hermes")
    with pytest.raises(UserError, match=r"'environment.tool_parser' has no effect"):
        load_environment(ours)


@pytest.fixture(params=["Sums", "Slow"])
def pool(request: pytest.FixtureRequest) -> Iterator[EnvironmentPool]:
    """Worker processes, whose calls wait or do not."""
    with closing(EnvironmentPool(config_of(request.param))) as opened:
        yield opened


def test_episodes_live_in_worker_processes(pool: EnvironmentPool) -> None:
    """As those of any environment; the pool knows that they have tools."""
    assert pool.has_tools and pool.stop == ()
    pool.ask([Call("1", row=ROW, seed=7)])
    assert pool.replies(1)["1"] == Reply()
    pool.ask([Call("1", tool_calls=[RIGHT])])
    counted = {"tools/calls": 1.0, "tools/errors": 0.0}
    assert pool.replies(1)["1"] == Reply(messages=[{"role": "tool", "name": "add", "content": "46"}], parts=counted)
    pool.ask([Call("1", text="46")])
    assert pool.replies(1)["1"] == Reply(done=True, reward=1.0)


def test_a_tool_that_ends_its_process_fails_the_episode_alone() -> None:
    """With a reason, and the pool goes on."""
    config = EnvironmentConfig(type="tests.chat.environments:Named", workers=1, timeout_s=20.0)
    with closing(EnvironmentPool(config)) as opened:
        for tool, reason in (("leave", "exit"), ("stop", "stopped")):
            opened.ask([Call("1", row=ROW)])
            assert opened.replies(1)["1"].failure is None
            opened.ask([Call("1", tool_calls=[ToolCall(tool, {})])])
            assert reason in str(opened.replies(1)["1"].failure)
