"""Episodes on OpenEnv servers: real ones, in an interpreter that has its library, and ones that misbehave.

OpenEnv does not go with vLLM's libraries, so the slow tests install it into an environment of its own, or take the
interpreter that PENSTOCK_OPENENV_PYTHON names. Its package brings one environment, the echo that `openenv init` writes;
openenv_examples.py has further ones on the same library.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments import openenv, openenv_servers
from penstock.environments.environment import ToolCall
from penstock.environments.loading import is_async, load_environment, tools_told
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call, Reply
from tests.gateway.openenv_interpreter import VARIABLE, uvicorn
from tests.gateway.openenv_interpreter import openenv_python as openenv_python
from tests.sockets import doors, open_to_others
from tests.waiting import until

HERE = Path(__file__).parent
ECHO = {"server": "echo", "action": "message", "observation": "echoed_message"}
CODING = {"server": "coding", "action": "code", "observation": ["stdout", "stderr"]}
SUMS = {"server": "sums", "action": "number", "observation": "stdout"}


def config_of(kind: str, settings: dict[str, Any], timeout_s: float = 120) -> EnvironmentConfig:
    return EnvironmentConfig(
        type=f"penstock.environments.openenv:{kind}", settings=settings, workers=1, timeout_s=timeout_s
    )


@contextmanager
def pool(kind: str, settings: dict[str, Any], timeout_s: float = 120) -> Iterator[EnvironmentPool]:
    """One worker process."""
    with closing(EnvironmentPool(config_of(kind, settings, timeout_s))) as opened:
        yield opened


def ask(opened: EnvironmentPool, episode: str = "1", **call: Any) -> Reply:
    opened.ask([Call(episode, **call)])
    return opened.replies(1)[episode]


def describe(folder: Path, servers: dict[str, Any]) -> None:
    (folder / ".openenv.json").write_text(json.dumps({"servers": servers}))
    openenv._schemas.clear()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- real servers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def echo(openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of OpenEnv's own environment, as its command writes it: with one session at a time."""
    folder = tmp_path_factory.mktemp("environments")
    subprocess.run([Path(openenv_python).with_name("openenv"), "init", "echo"], cwd=folder, check=True, timeout=120)
    return folder


@pytest.fixture
def servers(here: Path, openenv_python: str, echo: Path) -> None:
    """A working folder that names them."""

    examples = {name: uvicorn(openenv_python, f"openenv_examples:{name}", HERE) for name in ("coding", "sums", "shop")}
    own = {
        "command": openenv_python,
        "args": ["-m", "echo.server.app", "--port", "{port}"],
        "env": {"PYTHONPATH": str(echo)},
    }
    describe(here, examples | {"echo": uvicorn(openenv_python, "echo.server.app:app", echo), "open": own})


def running() -> list[psutil.Process]:
    """The servers of openenv_examples.py below this process, which may have servers of other kinds."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also one that has ended and is not waited for yet
            if any(word.startswith("openenv_examples:") for word in process.cmdline()):
                found.append(process)
    return found


def server_of(opened: EnvironmentPool) -> psutil.Process:
    """The server that a pool's worker has started."""
    ask(opened, "first", row={})
    opened.abandon(["first"])
    (server,) = running()
    return server


class TestReal:
    pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("openenv")]

    def test_openenvs_own_environment_is_played(self, servers: None) -> None:
        """Observation and reward are the server's, turn by turn; chat markup goes around what it says."""
        markup = {"before": "<b>", "after": "<a>"}
        with pool("Gym", ECHO | markup) as opened:
            assert ask(opened, row={}, seed=7).observation == "Echo environment ready!<a>"
            assert ask(opened, text="hello") == Reply("<b>hello<a>", reward=0.5)
            assert ask(opened, text="") == Reply("<b>(nothing)<a>", reward=0.0)
        with pool("Gym", ECHO | {"opening": False}) as opened:
            assert ask(opened, row={}) == Reply()

    def test_a_reset_gets_the_seed_and_columns_and_the_server_says_when_it_is_over(self, servers: None) -> None:
        """The row's other columns stay here. Control: an answer that is not the wanted one does not end it."""
        with pool("Gym", CODING | {"reset": ["wanted"]}) as opened:
            row = {"wanted": "42", "prompt": "what is it?"}
            assert ask(opened, row=row, seed=(3 << 31) + 7).observation == "seed 7"
            assert ask(opened, text="x = 6\nprint(x)") == Reply("6\n", reward=-0.25)
            assert ask(opened, text="print(7 * x)") == Reply("42\n", done=True, reward=1.0)
            assert ask(opened, row={}).failure is not None

    def test_episodes_have_sessions_of_their_own(self, servers: None) -> None:
        """Of one server; those that are over, or abandoned, make room for others: it has four at a time."""
        with pool("Gym", CODING) as opened:
            for generation in range(3):
                names = [f"{generation}-{k}" for k in range(4)]
                opened.ask([Call(name, row={}) for name in names])
                assert {reply.failure for reply in opened.replies(4).values()} == {None}
                opened.ask([Call(name, text=f"x = '{name}'") for name in names])
                opened.replies(4)
                opened.ask([Call(name, text="print(x)", last=generation > 0) for name in names])
                assert {name: reply.observation for name, reply in opened.replies(4).items()} == {
                    name: f"{name}\n" for name in names
                }
                opened.abandon(names)

    def test_a_server_without_a_session_left_says_so(self, servers: None) -> None:
        """The echo has one, as OpenEnv writes it. Control: its first episode goes on."""
        with pool("Gym", ECHO) as opened:
            ask(opened, row={})
            refused = ask(opened, "2", row={})
            assert refused.failure is not None and "CAPACITY_REACHED" in refused.failure
            assert ask(opened, text="hello").observation == "hello"

    def test_a_turn_that_is_no_action_is_told_to_the_policy(self, servers: None) -> None:
        """A field that the action does not have is the recipe's mistake and fails; so does a broken environment."""
        with pool("Gym", SUMS) as opened:
            assert ask(opened, row={}) == Reply()
            told = ask(opened, text="three")
            assert told.failure is None and "number: Input should be a valid integer" in str(told.observation)
            assert ask(opened, text=" 3\n").observation == "3"
        with pool("Gym", SUMS | {"action": "nmber"}) as opened:
            ask(opened, row={})
            assert "nmber: Extra inputs are not permitted" in str(ask(opened, text="3").failure)
        with pool("Gym", CODING) as opened:
            ask(opened, row={})
            assert "the environment itself is broken" in str(ask(opened, text="raise").failure)
        with pool("Gym", ECHO | {"observation": "echoed"}) as opened:
            assert "have no 'echoed': they have " in str(ask(opened, row={}).failure)

    def test_the_template_is_told_of_the_servers_tools(self, servers: None) -> None:
        """In OpenAI's form; and the server that was asked is gone. A server without tools is the wrong one."""
        told = tools_told(config_of("Tools", {"server": "shop"}))
        assert told is not None
        assert [tool["function"]["name"] for tool in told] == ["price_of", "buy", "leave"]
        assert told[0]["function"]["description"].startswith("Look up a price.")
        assert told[0]["function"]["parameters"]["required"] == ["item"]
        assert is_async(load_environment(config_of("Tools", {"server": "shop"}))())
        assert not running()
        with pytest.raises(UserError, match="'coding'"):
            tools_told(config_of("Tools", {"server": "coding"}))

    def test_tools_are_called_and_mistakes_come_back_as_results(self, servers: None) -> None:
        """Rewards of a turn's calls are added; where the server says that it is over no more tools are called."""
        with pool("Tools", {"server": "shop", "reset": ["budget"]}) as opened:
            assert opened.has_tools
            opened.ask([Call(name, row={"budget": 3}) for name in ("1", "2")])
            assert opened.replies(2) == {"1": Reply(), "2": Reply()}
            calls = [
                ToolCall("price_of", {"item": "tea"}),
                ToolCall("buy", {"count": 1}),
                ToolCall("buy", {"count": 1}),
            ]
            found = ask(opened, tool_calls=calls)
            assert [message["content"] for message in found.messages] == ["3", "1 of 3", "2 of 3"]
            assert (found.done, found.reward) == (False, 1.0)
            calls = [ToolCall("price_of", {}), ToolCall("price_of", None), ToolCall("sell", {})]
            errors = [json.loads(message["content"])["error"] for message in ask(opened, tool_calls=calls).messages]
            assert "item" in errors[0] and errors[1] == "the arguments are no JSON object" and "sell" in errors[2]
            found = ask(opened, tool_calls=[ToolCall("buy", {"count": 1}), ToolCall("price_of", {"item": "tea"})])
            assert found.messages == [{"role": "tool", "name": "buy", "content": "3 of 3"}]
            assert (found.done, found.reward) == (True, 0.5)
            assert ask(opened, "2", tool_calls=[ToolCall("buy", {"count": 1})]).messages[0]["content"] == "1 of 3"
            assert ask(opened, "2", text="that is all") == Reply(done=True)

    def test_a_server_that_dies_fails_its_episodes_and_is_started_anew(self, servers: None) -> None:
        """Killed from outside, and by a tool of its own; the next episode has another."""
        with pool("Gym", CODING) as opened:
            server = server_of(opened)
            ask(opened, row={})
            server.kill()
            assert "the OpenEnv server 'coding' is gone" in str(ask(opened, text="print(1)").failure)
            until(lambda: ask(opened, row={}).failure is None, 60.0, "another server")
            assert ask(opened, text="print(1)").observation == "1\n"
        with pool("Tools", {"server": "shop"}) as opened:
            ask(opened, row={})
            assert "the OpenEnv server 'shop' is gone" in str(ask(opened, tool_calls=[ToolCall("leave", {})]).failure)

    def test_a_server_is_of_this_machine_alone_and_ends_with_its_worker(self, servers: None) -> None:
        """It gets few variables of ours. What would listen for others is refused, as OpenEnv's own command does."""
        with pool("Gym", CODING) as opened:
            server = server_of(opened)
            assert [*doors(server)] and not open_to_others(doors(server))
            assert not {*server.environ()} & {"PYTHONPATH", VARIABLE, "PYTEST_CURRENT_TEST"}
        until(lambda: not server.is_running(), 60.0, "the server to end")
        with pool("Gym", ECHO | {"server": "open"}) as opened:
            assert "listens on 0.0.0.0, which others reach" in str(ask(opened, row={}).failure)


# ---- servers that misbehave ----------------------------------------------------------------------------------------


@contextmanager
def misbehaving() -> Iterator[tuple[str, set[int]]]:
    """A WebSocket server that does; return its address, and the sessions that it has at the moment."""
    sessions: set[int] = set()

    def talk(connection: ServerConnection) -> None:
        sessions.add(id(connection))
        with suppress(ConnectionClosed):
            for message in connection:
                misbehave(connection, json.loads(message)["data"].get("word"))
        sessions.remove(id(connection))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/", sessions
        server.shutdown()
        thread.join()


def observation(text: str) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": text}, "reward": 1, "done": False}})


def misbehave(connection: ServerConnection, word: str | None) -> None:
    """Answer a reset well, which has no word, and most words not."""
    match word:
        case None:
            connection.send(observation("ready"))
        case "garbage":
            connection.send("<html>" + "x" * 1000)
        case "other":
            connection.send(json.dumps({"type": "observation", "data": [1]}))
        case "bytes":
            connection.send(b"\xff\xfe")
        case "huge":
            connection.send(observation("x" * 2_000_000))
        case "large":
            connection.send(observation("x" * 1_000_000))
        case "silent":
            pass
        case "leave":
            connection.close()


WORDS = {"server": "words", "action": "word", "observation": "text"}


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("garbage", "answers with no message of OpenEnv's: '<html>xxx"),
        ("other", "answers with no message of OpenEnv's"),
        ("bytes", "answers with no message of OpenEnv's"),
        ("huge", "sent more than 1,048,576 bytes in one message"),
        ("silent", "timed out after 3 s"),
        ("leave", "the OpenEnv server 'words' is gone"),
    ],
)
def test_what_is_no_answer_fails_the_episode_by_name(here: Path, word: str, failure: str) -> None:
    """At the end of `timeout_s` at the latest, and no other episode. Control: a large answer is one."""
    with misbehaving() as (url, _):
        describe(here, {"words": {"url": url}})
        with pool("Gym", WORDS, timeout_s=3) as opened:
            assert ask(opened, row={}).observation == "ready"
            assert ask(opened, "2", row={}).observation == "ready"
            assert failure in str(ask(opened, text=word).failure)
            assert ask(opened, "2", text="large") == Reply("x" * 1_000_000, reward=1.0)


def test_a_session_ends_with_its_episode(here: Path) -> None:
    """One that was cut, one that failed, one that was abandoned; nobody tells an environment of its end."""
    with misbehaving() as (url, sessions):
        describe(here, {"words": {"url": url}})
        with pool("Gym", WORDS) as opened:
            opened.ask([Call(name, row={}) for name in ("cut", "failed", "abandoned", "going on")])
            opened.replies(4)
            assert len(sessions) == 4
            ask(opened, "cut", text="large", last=True)
            ask(opened, "failed", text="garbage")
            opened.abandon(["abandoned"])
            until(lambda: len(sessions) < 2, 20.0, "the sessions to end")
            assert ask(opened, "going on", text="large").failure is None


class Spoken(openenv.Gym):
    """As a user's own: the action stands somewhere in the turn."""

    def action_of(self, text: str) -> dict[str, Any]:
        return {"word": text.rpartition("word:")[2]}


def test_a_class_of_ones_own_finds_the_action_in_the_turn(here: Path) -> None:
    """The control: without it the whole turn is the action."""
    with misbehaving() as (url, _):
        describe(here, {"words": {"url": url}})
        config = config_of("Gym", WORDS, timeout_s=3)
        own = config.model_copy(update={"type": f"{__name__}:{Spoken.__name__}"})
        for played, failure in ((own, "answers with no message"), (config, "timed out")):
            with closing(EnvironmentPool(played)) as opened:
                ask(opened, row={})
                assert failure in str(ask(opened, text="I say word:garbage").failure)


@pytest.mark.parametrize(
    ("entry", "failure"),
    [
        (
            {"command": sys.executable, "args": ["-c", "exit('no such {port}'[:7])"]},
            "ends at its start (exit code 1): no such",
        ),
        ({"command": "no-such-program", "args": ["{port}"]}, "there is no program 'no-such-program'"),
        ({"command": "sleep", "args": ["60{port}"]}, "timed out after 3 s"),
        ({"url": "ws://127.0.0.1:1"}, "the OpenEnv server 'words' does not answer: ConnectionRefusedError"),
    ],
)
def test_a_server_that_does_not_start_fails_the_episode_by_name(
    here: Path, entry: dict[str, Any], failure: str
) -> None:
    describe(here, {"words": entry})
    with pool("Gym", WORDS, timeout_s=3) as opened:
        failed = ask(opened, row={})
    assert failure in str(failed.failure)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eco", r"has no OpenEnv server 'eco' \(did you mean 'echo'\?\)"),
        ("both", "needs either 'command' or 'url'"),
        ("deaf", "is not told its port"),
    ],
)
def test_mistakes_are_said_before_anything_starts(here: Path, name: str, message: str) -> None:
    describe(
        here,
        {
            "echo": {"url": "ws://127.0.0.1:1"},
            "both": {"command": "x", "args": ["{port}"], "url": "ws://127.0.0.1:1"},
            "deaf": {"command": "x", "args": ["8000"]},
        },
    )
    for kind, settings in (("Gym", WORDS | {"server": name}), ("Tools", {"server": name})):
        with pytest.raises(UserError, match=message):
            load_environment(config_of(kind, settings))
    with pytest.raises(UserError, match="the OpenEnv server 'echo' does not answer"):
        tools_told(config_of("Tools", {"server": "echo"}))


def test_what_tells_of_no_tools_is_said_in_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a training, where nothing else has a deadline: one that never listens, and one that never answers."""
    monkeypatch.setattr(openenv_servers, "START_S", 0.5)
    monkeypatch.setattr(openenv, "ASKED_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        describe(here, {"deaf": {"command": "sleep", "args": ["60", "{port}"]}, "dumb": {"url": address}})
        for name, message in (
            ("deaf", "'deaf' does not listen on port"),
            ("dumb", "'dumb' does not answer within 0.5 s"),
        ):
            with pytest.raises(UserError, match=message):
                tools_told(config_of("Tools", {"server": name}))
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"]


def test_servers_come_from_the_working_folder_alone(here: Path) -> None:
    """Without the file there are none, whatever a recipe says."""
    with pytest.raises(UserError, match=r"there is no .*\.openenv\.json"):
        load_environment(config_of("Gym", WORDS))
    with pytest.raises(UserError, match="unexpected keyword argument 'url'"):
        load_environment(config_of("Gym", WORDS | {"url": "ws://127.0.0.1:1"}))
