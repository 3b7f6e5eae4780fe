"""`penstock serve`: which folder it serves, with which settings, and that its server ends with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from penstock.base.errors import UserError
from penstock.cli.app import app
from penstock.cli.serving.serve import model_folder, serve, server_command, server_environment
from tests.processes import words_of

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """
import signal, subprocess, sys, tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
tempfile.mkstemp(prefix="left-")  # as vLLM's sockets
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # an engine that SIGTERM does not reach
HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
FAILING = """
print("INFO: a long story\\nValueError: no room for the KV cache", flush=True)
print("nanobind: leaked 4 instances!\\n" * 30, flush=True)
raise SystemExit(3)
"""
COMMAND = """
import sys
from pathlib import Path
from penstock.cli.serving import serve
serve.SERVER = "stand_in"
serve.server_command = lambda folder, port, *_: [sys.executable, "-m", "stand_in", "--port", str(port)]
serve.serve(Path(sys.argv[1]), int(sys.argv[2]), None, lambda text: print(text, flush=True))
"""


def write_model(folder: Path, dtype: str = "bfloat16") -> Path:
    """Write what the command looks at."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"dtype": "{dtype}"}}')
    return folder


def test_a_folder_or_a_runs_newest_model_is_served(tmp_path: Path) -> None:
    """The final model before an export, which may be older; a run without either is told how to get one."""
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    (run / "data" / "train.parquet").touch()
    write_model(run / "models" / "sft")  # of the warm-up: not what the run is for
    with pytest.raises(UserError, match="penstock export"):
        model_folder(run)
    export = write_model(run / "models" / "export")
    assert model_folder(run) == export == model_folder(export)
    assert write_model(run / "models" / "final") == model_folder(run)
    with pytest.raises(UserError, match="neither a model folder nor a run"):
        model_folder(tmp_path)


def test_the_model_of_a_run_without_iterations_is_served(tmp_path: Path) -> None:
    """Supervised training leaves `sft`, preferences `final`; before its end such a run has nothing to export."""
    (tmp_path / "config.yaml").write_text("name: run\n")
    with pytest.raises(UserError, match="when all its steps are done"):
        model_folder(tmp_path)
    assert write_model(tmp_path / "models" / "sft") == model_folder(tmp_path)
    assert write_model(tmp_path / "models" / "final") == model_folder(tmp_path)


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        ("sums-1", "sums-1", []),
        ("newest", "sums-1", []),
        ("sums-1/models/sft", "sft", []),
        ("sums-1", "mine", ["--name", "mine"]),
    ],
)
def test_a_served_run_is_called_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str, options: list[str]
) -> None:
    """And not `final`, as the models of all runs are. Controls: a model folder, and `--name`."""
    (tmp_path / "sums-1").mkdir()
    (tmp_path / "sums-1" / "config.yaml").write_text("name: sums\n")
    (tmp_path / "newest").symlink_to("sums-1")
    write_model(tmp_path / "sums-1" / "models" / "sft")
    served = []
    monkeypatch.setattr("penstock.cli.serving.serve.serve", lambda *arguments: served.append(arguments))
    app(["serve", str(tmp_path / given), *options], standalone_mode=False)
    assert [arguments[0].name for arguments in served] == ["sft"]
    assert [arguments[-1] for arguments in served] == [name]


def test_settings_follow_the_machine(tmp_path: Path) -> None:
    """Weights keep their dtype on a GPU, of which a fifth stays free; a CPU computes in float32 without compiling."""
    folder = write_model(tmp_path / "tiny")

    def options(gpu_memory: float | None, gpus: int) -> str:
        return " ".join(server_command(folder, 8000, gpu_memory, gpus))

    for given in (options(None, 0), options(None, 1)):
        assert f"--model {folder} --served-model-name tiny --host 127.0.0.1 --port 8000" in given
    assert "--dtype float32 --enforce-eager" in options(None, 0)
    assert "--dtype bfloat16 --gpu-memory-utilization 0.8" in options(None, 1)
    assert "--gpu-memory-utilization 0.5" in options(0.5, 1)
    assert "--served-model-name judge" in " ".join(server_command(folder, 8000, None, 0, "judge"))
    with pytest.raises(UserError, match="--gpu-memory has no effect"):
        options(0.5, 0)


def test_compiled_code_outlives_a_server_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps it, and Triton's kernels, where the next server looks, not where this one's temporary files go.

    Controls: without the variable it would; a folder that the user has named; a CPU, for which nothing is compiled.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir, triton_cache_dir

    variable, scratch = "TORCHINDUCTOR_CACHE_DIR", tmp_path / "scratch"
    for name in (variable, "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    environment = server_environment(str(scratch), 1)
    assert environment["TMPDIR"] == str(scratch) and variable not in server_environment(str(scratch), 0)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert Path(default_cache_dir()).is_relative_to(scratch)
    monkeypatch.setenv(variable, environment[variable])
    assert Path(triton_cache_dir(0)).is_relative_to(tmp_path / "caches" / "penstock")
    monkeypatch.setenv(variable, "/chosen")
    assert server_environment(str(scratch), 1)[variable] == "/chosen"


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Before vLLM starts, whatever answers there."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(UserError, match="name another port"):
            serve(write_model(tmp_path / "tiny"), other.server_address[1], None, print)
        thread.join()


def stood_in(folder: Path, server: str) -> tuple[list[str], dict[str, str]]:
    """The command that serves `folder` with a program in vLLM's place, and its environment."""
    (folder / "stand_in.py").write_text(textwrap.dedent(server))
    (folder / "config.json").write_text("{}")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        port = free.server_address[1]
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "TMPDIR": str(folder)}
    return [sys.executable, "-c", COMMAND, str(folder), str(port)], environment


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_the_server_ends_with_its_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C and SIGTERM end it and what it started, and of its temporary files nothing stays but its log; a killed
    command takes the server along.

    A stand-in is served, since only its processes matter here; vLLM's own server ends its engine by itself.
    """
    arguments, environment = stood_in(tmp_path, STAND_IN)
    command = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdout is not None
    while "speaks OpenAI's API" not in command.stdout.readline():
        assert command.poll() is None
    below = psutil.Process(command.pid).children(recursive=True)
    assert len(below) == 3  # the server, its engine, and the shell that watches
    engine = [process for process in below if "time.sleep(600)" in " ".join(words_of(process))]
    assert len(engine) == 1
    command.send_signal(number)
    assert command.wait(20) == code
    if number == signal.SIGKILL:  # then only what watches the command can act, and this engine does not watch
        below = [process for process in below if process not in engine]
    left = psutil.wait_procs(below, timeout=10)[1]
    for process in engine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left
    files = [path.name for path in tmp_path.rglob("*") if path.name.startswith(("left-", "penstock-serve-"))]
    logs = [name for name in files if name.endswith(".log")]
    assert len(logs) == 1
    assert (files == logs) == (number != signal.SIGKILL)  # which lets nobody clean up: that what is looked for is there


def test_a_server_that_nothing_can_watch_is_ended(tmp_path: Path) -> None:
    """Where the shell beside it cannot be started. The control is above: a server that is watched stays."""
    arguments, environment = stood_in(tmp_path, STAND_IN)
    unwatched = "serve.end_with_this_process = lambda pid: print(pid) or 1 / 0\nserve.SERVER ="
    arguments[2] = COMMAND.replace("serve.SERVER =", unwatched)
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert "ZeroDivisionError" in done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_server_that_ends_by_itself_is_quoted(tmp_path: Path) -> None:
    """Its error and its log, and nothing else of what it said. The controls are the servers above."""
    arguments, environment = stood_in(tmp_path, FAILING)
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    (log,) = tmp_path.glob("penstock-serve-*.log")
    assert done.stdout == f"starting vLLM on {tmp_path}, its log: {log}\n"
    expected = "vLLM ended with code 3\n    ValueError: no room for the KV cache\n  all that it said: "
    assert f"UserError: {expected}{log}" in done.stderr
    assert "a long story" in log.read_text()
    assert "leaked" not in done.stderr
