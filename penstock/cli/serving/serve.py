"""Serves a trained model with vLLM's own server, which speaks OpenAI's API: loopback, until Ctrl-C.

A language model answers prompts, a sequence classifier scores texts (`/classify`): a judge, or the reward model of
several trainings.

The server is a process of its own with a session of its own: Ctrl-C reaches this command alone, which then ends the
server and its engine. Started by module name, since vLLM's command does not start beside its CPU build. What it says
goes to a log file: it is much, and little of it is for people.

Left out: authentication, several machines, and anything else that vLLM's server has options for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.interrupts import interrupts_deferred
from penstock.checks.model.own_code import check_own_code
from penstock.checks.model.served import check_served_alone, check_served_images
from penstock.cli.prefect.server import end_with_this_process
from penstock.engines.families.architecture import classifies
from penstock.engines.families.shape import read_settings
from penstock.engines.groups import interface
from penstock.engines.groups.environment import compiled_code
from penstock.engines.groups.machine import visible_gpus
from penstock.state.run_folder import RunFolder

SERVER = "penstock.cli.serving.vllm_server"
END_TIMEOUT_S = 30.0
POLL_S = 0.25
ERROR = re.compile(r"\w(Error|Exception): ")
ERRORS_SHOWN = 5

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",  # the module's name is deprecated in favour of the command
}
_CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def model_folder(path: Path) -> Path:
    """Return the Hugging Face folder to serve: `path` itself, or the model that a run at `path` has left.

    Raises:
        UserError: there is none.
    """
    if (path / "config.json").is_file():
        return path.resolve()
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is neither a model folder nor a run", "name a folder with config.json, or a run")
    run = RunFolder(path)
    iterates = run.prompts("train").is_file()  # else its warm-up's model is all that it is for
    for name in ("final", "export") if iterates else ("final", "sft"):  # an export may be of an earlier checkpoint
        if (folder := run.model(name)).is_dir():
            return folder.resolve()
    if iterates:
        raise UserError(f"{path} has no model yet", f"write one from its checkpoint: penstock export {path}")
    raise UserError(
        f"{path} has no model yet: such a run writes it when all its steps are done", "let it end, or resume it"
    )


def server_command(folder: Path, port: int, gpu_memory: float | None, gpus: int, name: str | None = None) -> list[str]:
    """Return the command that serves `folder` on the loopback interface.

    Weights keep their dtype on a GPU; on a CPU they are computed in float32, which every processor has kernels for.

    Raises:
        UserError: a share of GPU memory was given, and there is no GPU.
    """
    if gpu_memory is not None and not gpus:
        raise UserError("--gpu-memory has no effect: no GPU is visible", "remove it")
    command = [sys.executable, "-P", "-m", SERVER, "--model", str(folder), "--served-model-name", name or folder.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    if not gpus:
        return [*command, "--dtype", "float32", "--enforce-eager"]
    config = read_settings(folder)
    dtype = config.get("dtype") or config.get("torch_dtype") or "auto"
    return [*command, "--dtype", dtype, "--gpu-memory-utilization", str(0.8 if gpu_memory is None else gpu_memory)]


def server_environment(scratch: str, gpus: int) -> dict[str, str]:
    """Return the server's environment: the user's, over what suits the machine, with temporary files in `scratch`."""
    suited = compiled_code() if gpus else _CPU
    return QUIET | suited | dict(os.environ) | interface.variables() | {"TMPDIR": scratch}


def serve(
    folder: Path, port: int, gpu_memory: float | None, say: Callable[[str], None], name: str | None = None
) -> None:
    """Serve `folder`, as `name` or under its own, until Ctrl-C, SIGTERM or the server's own end.

    No process of it outlives this call or this process.

    Raises:
        UserError: the port is taken, only its own code loads the model, or the server ends by itself; carries
            the errors of its log.
    """
    by_hand = f"read that code; if you trust it, vLLM's own command loads it: vllm serve {folder} --trust-remote-code"
    check_own_code(folder, "the model", None, by_hand)
    check_served_images(folder)
    check_served_alone(folder)
    url, gpus = f"http://127.0.0.1:{port}", len(visible_gpus())
    command = server_command(folder, port, gpu_memory, gpus, name)
    if _answers(url) is not None:
        raise UserError(f"something answers on {url} already", "name another port with --port")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits an ignored SIGINT
        signal.signal(number, _interrupt)
    with contextlib.ExitStack() as ends:
        # vLLM leaves its sockets behind where it keeps temporary files. Their paths may have 107 characters.
        scratch = ends.enter_context(tempfile.TemporaryDirectory(prefix="ps-", ignore_cleanup_errors=True))
        environment = server_environment(scratch, gpus)
        with (
            interrupts_deferred(),
            tempfile.NamedTemporaryFile(prefix=f"penstock-serve-{port}-", suffix=".log", delete=False) as output,
        ):
            server = subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)
            ends.callback(_end, server)
            ends.callback(_dismiss, end_with_this_process(server.pid))
        log = Path(output.name)
        try:
            say(f"starting vLLM on {folder}, its log: {log}")
            while _answers(url) != 200:
                if server.poll() is not None:
                    raise _ended(server.returncode, log)
                time.sleep(POLL_S)
            say(_welcome(url, name or folder.name, classifies(read_settings(folder))))
            raise _ended(server.wait(), log)
        except KeyboardInterrupt:
            say("ending")


def _ended(code: int, log: Path) -> UserError:
    """Return what to say of a server that ended by itself: the errors in its log, or else its end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if ERROR.search(line)] or lines
    return UserError("\n    ".join([f"vLLM ended with code {code}", *said[-ERRORS_SHOWN:]]), f"all that it said: {log}")


def _answers(url: str) -> int | None:
    """Return the status of the server's own health, None if nobody listens."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _welcome(url: str, model: str, classifier: bool) -> str:
    if classifier:
        body = json.dumps({"model": model, "input": ["12+34=046."], "use_activation": False})
        return (
            f"{url}/classify scores texts, model {model!r}. Ctrl-C ends it. For example:\n"
            f"  curl {url}/classify -H 'Content-Type: application/json' -d '{body}'\n"
            f"  penstock train RECIPE reward.service.url={url} reward.service.model={model}"
        )
    body = json.dumps({"model": model, "prompt": "12+34=", "max_tokens": 16})
    return (
        f"{url}/v1 speaks OpenAI's API, model {model!r}. Ctrl-C ends it. For example:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  penstock loadtest {url}"
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, so that requests end and the engine frees its memory; then SIGKILL for whatever is left of it."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.wait()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
