"""Models of the Hugging Face Hub by their names: from this machine's cache, or where that is allowed from a server.

The server is one of these tests that answers as the Hub does; the library that asks it is the Hub's own, in a process
of its own, since it reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.checks.found_models import with_models_found
from penstock.checks.hub import revision_of
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from tests.processes import ROOT

OLD, NEW = "0123456789abcdef" * 2 + "01234567", "fedcba9876543210" * 2 + "fedcba98"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
UNWANTED = {"pytorch_model.bin": b"pickle", "modeling_own.py": b"code", "onnx/model.safetensors": b"", "README.md": b""}
ASK = """
import sys
from penstock.base.errors import UserError
from penstock.checks.hub import snapshot
try:
    print(snapshot(sys.argv[1], "model.path"))
except UserError as error:
    print("refused", error)
"""


class Hub(BaseHTTPRequestHandler):
    """Answers for the model org/tiny, whose branch `main` is at the class's commit, and counts what it is asked."""

    commit = OLD
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        place = self.path.partition("?")[0].strip("/").split("/")
        if place[:4] == ["api", "models", "org", "tiny"] and place[4] == "revision":
            self._answer(json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": []}).encode())
        elif place[:4] == ["api", "models", "org", "tiny"] and place[4] == "tree":
            files = {**FILES, **UNWANTED}
            rows = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            self._answer(json.dumps(rows).encode())
        elif place[:3] == ["org", "tiny", "resolve"]:
            self._answer({**FILES, **UNWANTED}["/".join(place[4:])])
        else:
            self._answer(b'{"error": "Repository not found"}', 404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        headers = {"Content-Length": len(body), "ETag": f'"{hash(body)}"', "X-Repo-Commit": self.commit}
        if status != 200:
            headers["X-Error-Code"] = "RepoNotFound"
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    """Return the address of a server of the test's own."""
    Hub.commit, Hub.asked = OLD, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def asked(text: str, cache: Path, **variables: str) -> str:
    """Return what `snapshot` says of a text, in a process whose cache and variables are these."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = inherited | {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    command = [sys.executable, "-c", ASK, text]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def kept(cache: Path, commit: str = OLD) -> Path:
    """Put a snapshot into a cache, as the library does; return its folder."""
    folder = cache / "models--org--tiny" / "snapshots" / commit
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (cache / "models--org--tiny" / "refs").mkdir(exist_ok=True)
    (cache / "models--org--tiny" / "refs" / "main").write_text(commit, encoding="utf-8")
    return folder


def test_a_model_of_the_cache_is_found_and_nobody_is_asked(tmp_path: Path, hub: str) -> None:
    """By its branch and by its commit. Controls: one that is not there says how to get it; a folder is a folder."""
    folder = kept(tmp_path)
    for text in ("org/tiny", "org/tiny@main", f"org/tiny@{OLD}"):
        assert asked(text, tmp_path, HF_ENDPOINT=hub) == str(folder)
    for text in ("org/other", f"org/tiny@{NEW}"):
        said = asked(text, tmp_path, HF_ENDPOINT=hub)
        assert said.startswith(f"refused model.path: there is no folder {text}, and this machine's cache")
        assert "HF_HUB_OFFLINE=0" in said
    for text in ("tests/checks", "./org/tiny", "/org/tiny", "tiny", "a/b/c"):
        assert asked(text, tmp_path, HF_ENDPOINT=hub) == "None"
    assert Hub.asked == []


def test_where_it_is_allowed_a_model_is_downloaded(tmp_path: Path, hub: str) -> None:
    """The files that are used, and no code or pickle; a new commit of the branch is another folder beside the first.

    Controls: a model that the Hub does not have; a Hub that is not there.
    """
    online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    first = Path(asked("org/tiny", tmp_path, **online))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == FILES
    Hub.commit = NEW
    second = Path(asked("org/tiny", tmp_path, **online))
    assert (revision_of(first), revision_of(second)) == (f"org/tiny@{OLD}", f"org/tiny@{NEW}")
    assert first.is_dir()
    assert asked("org/other", tmp_path, **online).startswith(
        "refused model.path: there is no folder org/other, and the Hub does not give that model"
    )
    away = asked("org/other", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert "the Hugging Face Hub cannot be asked" in away


def test_a_run_keeps_folder_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the actor's model, the critic's and the reward's; what it keeps stays what it is.

    Controls: folders are left alone; a revision without a model, or one that is no commit, is refused.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = str(kept(tmp_path))
    tree = {
        "model": {"path": "org/tiny"},
        "critic": {"path": "org/tiny@main"},
        "algorithm": {"name": "ppo"},
        "reward": {"model": "org/tiny"},
    }
    config = with_models_found(config_from_mapping(tree, "test"))
    assert config.critic is not None
    assert (config.model.path, config.critic.path, config.reward.model) == (folder, folder, folder)
    assert config.model.revision == f"org/tiny@{OLD}"
    assert with_models_found(config) == config
    plain = TrainConfig.model_validate({"model": {"path": str(tmp_path)}})
    assert with_models_found(plain) == plain
    for wrong, said in (({"revision": f"org/tiny@{OLD}"}, "without 'path'"), ({"path": "a", "revision": "main"}, "")):
        with pytest.raises(UserError, match=f"revision.*{said}"):
            config_from_mapping({"model": wrong}, "test")
