"""Prefect's temporary server ends with its command, whatever ends the command."""

from __future__ import annotations

import base64
import os
import runpy
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from penstock.base.errors import UserError
from penstock.cli import terminal
from penstock.cli.prefect import server
from penstock.cli.prefect.deploy import LOCAL_SERVER, next_commands
from penstock.cli.prefect.server import MENDED, _make_home, _sessions_of_their_own, check_server, mended
from penstock.configs.schema import TrainConfig
from penstock.session.session import write_config
from penstock.state.run_folder import RunFolder
from tests.processes import alive, name_of
from tests.sockets import doors, open_to_others
from tests.waiting import came_true, until

ROOT = Path(__file__).resolve().parents[3]
COMMAND = """
import sys, time
from penstock.cli.prefect.server import start_server
start_server()
from prefect.server.api.server import SubprocessASGIServer
print(SubprocessASGIServer().server_process.pid, flush=True)
time.sleep(600)
"""
TELLING = """
import signal, time
from penstock.cli.prefect.server import start_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
start_server()
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer
try:
    print(SubprocessASGIServer().server_process.pid, flush=True)  # the signal may come at once
    while True:
        time.sleep(0.1)  # one that comes just before a sleep is heard after it
finally:
    with get_client(sync_client=True) as client:
        print("nobody there" if client.api_healthcheck() else "told", flush=True)
"""
# A flow stopped in the middle of a task. What the command says of it comes first, then what the server knows.
STOPPED = """
import os, signal, sys, time
from pathlib import Path
from penstock.cli import running
from penstock.cli.libraries import quiet_libraries
quiet_libraries()
from prefect import flow, task
from prefect.client.orchestration import get_client

@task
def working():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(600)

@flow
def training():
    working()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
try:
    with running.ending_in_words("train", Path(sys.argv[2])):
        training()
finally:
    with get_client(sync_client=True) as client:
        print(*[run.state_name for run in client.read_flow_runs()])
"""
# A flow whose server is killed before each of its two child flows. What the last server knows comes at the end.
BEREFT = """
import os, signal
from penstock.cli.libraries import quiet_libraries
from penstock.cli.prefect.server import start_server
quiet_libraries()
start_server()
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer
from prefect.variables import Variable

def server():
    return SubprocessASGIServer().server_process.pid

@flow
def iteration(number):
    Variable.get("nothing", default=None)

@flow
def training():
    for number in (1, 2):
        print(killed := server(), flush=True)
        os.kill(killed, signal.SIGKILL)
        iteration(number)

training()
print(server())
with get_client(sync_client=True) as client:
    print(*[run.state_name for run in client.read_flow_runs()])
"""
# A process that a library starts where Prefect starts its server, and the command is still waiting for it.
STARTING = """
import subprocess, sys, time
from penstock.cli.prefect import server
with server._sessions_of_their_own():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
from penstock.cli.prefect.server import end_with_this_process
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[1] == "guarded":
    keep = end_with_this_process(child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""


def start(code: str, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start Python on `code`; return it and the process whose id it prints first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group whose signals do not reach the tests
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("code", [PARENT, STARTING], ids=["guarded", "starting"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_is_watched_ends_with_its_parent(number: signal.Signals, code: str) -> None:
    """Also where the parent can run nothing any more, and while a server still starts. Control: the next test."""
    parent, child = start(code, "guarded")
    assert alive(child)
    parent.send_signal(number)
    parent.wait(10)
    assert came_true(lambda: not alive(child), 10)


def test_the_end_of_a_server_that_was_collected_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a command Prefect ends its server and waits for it, and may be faster than who watches it."""
    ended, leaving = subprocess.Popen([sys.executable, "-S", "-c", ""]), threading.Event()
    ended.wait(10)
    leaving.set()
    monkeypatch.setattr(server, "_server", lambda: ended)
    server._start_again(leaving)
    with pytest.raises(ChildProcessError):  # what the watch meets
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)


def test_a_child_that_is_not_watched_stays() -> None:
    """The control: nothing else in these tests ends an orphan."""
    parent, child = start(PARENT, "alone")
    parent.kill()
    parent.wait(10)
    try:
        assert not came_true(lambda: not alive(child), 0.5)
    finally:
        child.kill()


def with_server(folder: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_can_still_tell_its_server_when_its_whole_group_gets_a_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As from a terminal or `timeout`; then the server ends too."""
    command, server = start(TELLING, **with_server(tmp_path))
    os.killpg(command.pid, number)
    assert command.communicate(timeout=60)[0] == "told\n"
    assert command.returncode in (128 + number, -number)
    assert came_true(lambda: not alive(server), 20)


@pytest.mark.slow
def test_a_flow_goes_on_when_its_server_is_killed(tmp_path: Path) -> None:
    """Twice, between two requests and for a client that was never connected before; the last server ends in order.

    With the same database, port and password: what the first server knew the last one knows.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    ended = subprocess.run(
        [sys.executable, "-c", BEREFT],
        cwd=ROOT,
        env=inherited | with_server(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *servers, states = ended.stdout.splitlines()
    assert states == "Completed Completed Completed"
    assert len(set(servers)) == 3
    assert not any(alive(int(server)) for server in servers)
    assert ended.stderr.count("Prefect's temporary server has ended: it is started again") == 2


@pytest.mark.slow
def test_the_temporary_server_answers_nobody_else_and_outlives_no_killed_command(tmp_path: Path) -> None:
    """Without its password nothing is read and nothing written; with it, all is. It is in no command line.

    A value set by another command of the same user arrives all the same. Control: the health that Prefect asks for at
    the start is anybody's. Then SIGKILL of the shell that watches, and of the command once there is another shell: none
    of them can do anything about it. All in a folder of which not even the parent was.
    """
    settings = with_server(tmp_path / "missing" / "home")
    run = RunFolder(tmp_path / "run")
    write_config(run, TrainConfig(iterations=2))
    command, server = start(COMMAND, **settings)
    try:
        said = server.cmdline()
        assert MENDED[1] in said
        password = server.environ()["PREFECT_SERVER_API_AUTH_STRING"]
        assert len(password) > 30
        assert not any(password in argument for argument in [*said, *psutil.Process(command.pid).cmdline()])
        assert (found := list(doors(psutil.Process(command.pid)))) and not open_to_others(found)
        api = f"http://127.0.0.1:{said[said.index('--port') + 1]}/api"
        value = {"name": "penstock_run", "value": {"rollout.temperature": 9}}
        with httpx.Client(base_url=api, timeout=60) as stranger:
            assert stranger.get("/health").status_code == 200
            assert stranger.post("/flow_runs/filter", json={}).status_code == 401
            assert stranger.post("/variables/", json=value).status_code == 401
        with httpx.Client(base_url=api, timeout=60, auth=tuple(f":{password}".split(":", 1))) as guess:
            assert guess.post("/flow_runs/filter", json={}).status_code == 401
        token = base64.b64encode(password.encode()).decode()
        with httpx.Client(base_url=api, timeout=60, headers={"Authorization": f"Basic {token}"}) as mine:
            assert mine.post("/variables/filter", json={}).json() == []
            setting = [sys.executable, "-m", "penstock.cli.main", "set", str(run.path), "rollout.temperature=0.5"]
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
            subprocess.run(setting, cwd=ROOT, env=inherited | settings, check=True, capture_output=True)
            (there,) = mine.post("/variables/filter", json={}).json()
            assert there["value"] == {"rollout.temperature": 0.5}
        assert alive(server)
        (shell,) = shells_of(command.pid)
        shell.kill()
        until(lambda: set(shells_of(command.pid)) - {shell}, 10, "another shell watches")
    finally:
        command.kill()
        command.wait(10)
    assert came_true(lambda: not alive(server), 20)


def test_prefect_starts_the_temporary_server_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is Prefect's own but for the module. Control: as it is, and any other program, stays as it is."""
    from prefect.server.api.server import SubprocessASGIServer

    started: list[list[str]] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda _, args, **__: started.append(args))
    monkeypatch.setattr(server, "end_with_this_process", lambda _: None)
    monkeypatch.setattr(server, "_keep_shell", lambda *_: None)
    monkeypatch.setattr(server._Apart, "pid", 0, raising=False)
    starting = SubprocessASGIServer(4321)
    starting._run_uvicorn_command()
    with _sessions_of_their_own():
        starting._run_uvicorn_command()
    as_it_is, ours = started
    assert as_it_is[:3] == [sys.executable, *server.UVICORN]
    assert ours == [sys.executable, *MENDED, *as_it_is[3:]]
    assert mended(["git", "status"]) == ["git", "status"]


def test_the_temporary_server_is_mended_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: importing what it is started by changes nothing yet."""
    import aiosqlite
    import uvicorn
    from prefect.server.utilities.messaging import memory

    from penstock.cli.prefect.own_server import execute

    for owner, name in ((aiosqlite.Cursor, "_execute"), (memory.Subscription, "retry")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    seen: list[bool] = [aiosqlite.Cursor._execute is execute]
    monkeypatch.setattr(uvicorn, "main", lambda: seen.append(aiosqlite.Cursor._execute is execute))
    runpy.run_module(MENDED[1], run_name="__main__")
    assert seen == [False, True]


def shells_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if name_of(child) == "sh"]


@pytest.mark.parametrize("configured", [True, False])
def test_no_password_of_a_server_that_does_not_answer_is_told(configured: bool) -> None:
    """Of the configured server, and of the one that `penstock deploy` looks for. Control: without either, none is."""
    address = f"http://alice:sesame@127.0.0.1:9/{'api' if configured else 'other'}"
    with temporary_settings({PREFECT_API_URL: address if configured else None}):
        with pytest.raises(UserError, match="no Prefect server answers at http://127") as caught:
            check_server(address)
        assert ("PREFECT_API_URL)" in caught.value.problem) == configured
        if not configured:
            check_server()
    assert "sesame" not in str(caught.value)


def test_a_server_that_refuses_is_told_without_its_password() -> None:
    """What it answered, too, holds the address."""
    with HTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        thread = threading.Thread(target=refusing.handle_request)
        thread.start()
        with (
            temporary_settings({PREFECT_API_URL: f"http://alice:sesame@127.0.0.1:{refusing.server_port}/api"}),
            pytest.raises(UserError, match="418") as caught,
        ):
            check_server()
        thread.join()
    assert "sesame" not in str(caught.value)


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(418)

    def log_message(self, *_: object) -> None: ...


def test_a_home_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    """Said at once, with the name of the setting. Control: the folder beside it is made."""
    (tmp_path / "file").write_text("")
    with temporary_settings({PREFECT_HOME: tmp_path / "file" / "home"}), pytest.raises(UserError, match="PREFECT_HOME"):
        _make_home()
    with temporary_settings({PREFECT_HOME: tmp_path / "new" / "home"}):
        _make_home()
    assert (tmp_path / "new" / "home").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_flow_in_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    """A person's Ctrl-C, and a SIGTERM with its own code, as from Kubernetes; no word of Prefect's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    stopped = subprocess.run(
        [sys.executable, "-c", STOPPED, str(int(number)), str(tmp_path / "run")],
        cwd=ROOT,
        env=inherited | with_server(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    run = terminal.short_path(tmp_path / "run")
    assert stopped.stderr == f"stopped, the engines are down. Continue with: penstock train --resume {run}\n"
    assert stopped.stdout == "Crashed\n"
    assert stopped.returncode == 128 + number


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://127.0.0.1:4261/api", "PREFECT_API_URL=http://127.0.0.1:4261/api "),
        (None, f"PREFECT_API_URL={LOCAL_SERVER} "),
        ("http://penstock:sesame@127.0.0.1:4261/api", ""),
    ],
)
def test_the_next_commands_work_in_terminals_of_their_own(
    monkeypatch: pytest.MonkeyPatch, address: str | None, shown: str
) -> None:
    """They name the server that this terminal alone knows, and no password."""
    if address is None:
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
    else:
        monkeypatch.setenv("PREFECT_API_URL", address)
    with temporary_settings({PREFECT_API_URL: address}):
        worker, run = next_commands("penstock")
    assert worker == f"{shown}prefect worker start --pool penstock"
    assert run.startswith(f"{shown}prefect deployment run ")
