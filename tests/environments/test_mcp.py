"""MCP servers as tools: real ones, over the protocol's own library; a recipe names them and cannot bring any."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.environment import ToolCall
from penstock.environments.loading import is_async, load_environment, tools_told
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call, Reply
from tests.waiting import until

SERVER = Path(__file__).resolve().parents[1] / "chat" / "mcp_server.py"


def config_of(*names: str) -> EnvironmentConfig:
    settings = {"names": [*names]}
    return EnvironmentConfig(type="penstock.environments.mcp:Servers", settings=settings, workers=1, timeout_s=60)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that names servers."""
    monkeypatch.chdir(tmp_path)
    run = {"command": sys.executable}
    servers = {
        "sums": {**run, "args": [str(SERVER)]},
        "process": {**run, "args": [str(SERVER), "process"]},
        "absent": {"command": "no-such-program"},
        "neither": {"args": []},
    }
    (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return tmp_path


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    """One worker process, connected to one server."""
    with closing(EnvironmentPool(config_of("sums"))) as opened:
        yield opened


def reply(pool: EnvironmentPool, **call: Any) -> Reply:
    pool.ask([Call("1", **call)])
    return pool.replies(1)["1"]


def said(found: Reply) -> list[str]:
    assert found.failure is None
    return [message["content"] for message in found.messages]


def test_the_template_is_told_of_the_servers_tools() -> None:
    """In OpenAI's form, with the schema that the server gives."""
    told = tools_told(config_of("sums"))
    assert told is not None
    assert [tool["function"]["name"] for tool in told] == ["add", "fail", "leave"]
    assert told[0]["function"]["description"] == "Add two numbers."
    assert told[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert is_async(load_environment(config_of("sums"))())


def test_calls_go_to_the_server_and_mistakes_come_back_as_results(pool: EnvironmentPool) -> None:
    """Also a tool's own, a name that no server has, and arguments that are none."""
    assert pool.has_tools
    assert reply(pool, row={}, seed=7) == Reply()
    assert said(reply(pool, tool_calls=[ToolCall("add", {"a": 12, "b": 34}), ToolCall("add", {"a": 1, "b": 1})])) == [
        "46",
        "2",
    ]
    calls = [ToolCall("fail", {}), ToolCall("add", {"a": "x"}), ToolCall("add", None), ToolCall("subtract", {})]
    errors = [json.loads(text)["error"] for text in said(reply(pool, tool_calls=calls))]
    assert "tool fail" in errors[0] and "validation error" in errors[1]
    assert errors[2:] == ["the arguments are no JSON object", "there is no tool 'subtract'"]
    assert reply(pool, text="46") == Reply(done=True)


def test_a_server_that_is_gone_fails_the_episode_and_is_started_anew(pool: EnvironmentPool) -> None:
    """For the next one. Control: without that, episodes share a server."""
    reply(pool, row={})
    failed = reply(pool, tool_calls=[ToolCall("leave", {})])
    assert failed.failure is not None and "the MCP server 'sums' is gone" in failed.failure
    assert reply(pool, row={}) == Reply()
    assert said(reply(pool, tool_calls=[ToolCall("add", {"a": 1, "b": 2})])) == ["3"]


def test_episodes_share_a_server_that_ends_with_their_process() -> None:
    """Two episodes hear of the same process, which is gone with the pool."""
    with closing(EnvironmentPool(config_of("process"))) as opened:
        opened.ask([Call(name, row={}) for name in ("1", "2")])
        opened.replies(2)
        opened.ask([Call(name, tool_calls=[ToolCall("process", {})]) for name in ("1", "2")])
        numbers = {content for found in opened.replies(2).values() for content in said(found)}
        (number,) = map(int, numbers)
        assert psutil.pid_exists(number)
    until(lambda: not psutil.pid_exists(number), 60.0, "the server to end")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sum"], r"has no MCP server 'sum' \(did you mean 'sums'\?\)"),
        (["neither"], "needs either 'command' or 'url'"),
        (["absent"], "the MCP server 'absent' of .mcp.json does not answer: FileNotFoundError"),
        (["sums", "process"], "two MCP servers have a tool 'add', one of them 'process'"),
    ],
)
def test_mistakes_are_said_before_anything_starts(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tools_told(config_of(*names))


def test_servers_come_from_the_working_folder_alone(here: Path) -> None:
    """Without the file there are none, whatever a recipe says."""
    (here / ".mcp.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*\.mcp\.json"):
        load_environment(config_of("sums"))
    own = EnvironmentConfig(
        type="penstock.environments.mcp:Servers", settings={"names": ["x"], "servers": {"x": {"command": "true"}}}
    )
    with pytest.raises(UserError, match="unexpected keyword argument 'servers'"):
        load_environment(own)
