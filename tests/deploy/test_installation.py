"""What pyproject.toml, the Dockerfile and .dockerignore say: read, since nothing here can build an image.

Invariant: an image holds the code and nothing of whoever builds it, and works for any user that it is started as.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def gets_in(path: str) -> bool:
    """Whether a file is sent to Docker: of the patterns that match it or a folder above it the last one decides."""
    inside = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        shape = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{shape}(/.*)?", path):
            inside = line.startswith("!")
    return inside


def test_everything_that_is_installed_gets_into_the_image() -> None:
    """All code, the templates of its pages, recipes, and what `penstock deploy` reads."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    templates = [
        f"penstock/{pattern.rstrip('*')}" for pattern in project()["tool"]["setuptools"]["package-data"]["penstock"]
    ]
    code = [path for path in files if path.startswith("penstock/") and path.endswith(".py")]
    packed = [path for path in files if path.startswith((*templates, "configs/", "deploy/pools/"))]
    packed = [path for path in packed if not path.endswith(".md")]
    assert len(code) > 200 and len(packed) > 8
    wanted = [*code, *packed, "prefect.yaml", "pyproject.toml", "setup.py", "LICENSE"]
    assert [path for path in wanted if not gets_in(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        "train.jsonl",
        "data/train.jsonl",
        "data/mine/rows.parquet",
        "models/Qwen2.5-1.5B-Instruct/model.safetensors",
        "rewards/models/judge/config.json",
        "checkpoints/000010/actor.pt",
        "runs/sums/manifest.json",
        "loadtests/one/loadtest.json",
        "mlflow.db",
        ".env",
        ".env.local",
        "secrets.yaml",
        ".git/config",
        ".venv/lib/python3.12/site-packages/torch/__init__.py",
        "penstock/__pycache__/cli.cpython-312.pyc",
        "tests/conftest.py",
    ],
)
def test_nothing_else_does(path: str) -> None:
    """Data and models that lie beside the code or within a room, runs, secrets. Control: the test above."""
    assert not gets_in(path)


def test_the_image_is_of_any_user() -> None:
    """Who is in no list of users finds a home, a name, and folders to write in: its own, the working folder, runs."""
    (folders,) = re.findall(r"install --directory --mode=1777 (.+?) *(?:\\)?\n", DOCKERFILE)
    home = re.search(r"\bHOME=(\S+)", DOCKERFILE)
    assert home is not None
    assert set(folders.split()) == {home[1], "/penstock", "/penstock/runs"}
    assert re.search(r"\bUSER=\S+", DOCKERFILE)  # getpass.getuser() asks for it before the list of users
    assert DOCKERFILE.index(folders) < DOCKERFILE.index("VOLUME /penstock/runs")  # a new volume takes the folder's mode
    assert "USER penstock\n" in DOCKERFILE  # and not root where nobody says who


def test_the_image_has_what_its_commands_need() -> None:
    """A training's libraries are those of every command; it is the image of the servers, too.

    Left out: developers', and what has to be asked for by name (further trackers, tasks of lm-evaluation-harness, MCP).
    """
    assert re.findall(r'--editable "\.\[(.+)\]"', DOCKERFILE) == ["$DEVICE,servers"]
    extras = {"cpu", "gpu", "servers", "trackers", "tasks", "optimizers", "mcp", "dev"}
    assert project()["project"]["optional-dependencies"].keys() == extras


def test_vllm_is_of_the_versions_that_were_seen() -> None:
    """A newer one is tried by somebody who knows that it is one."""
    (vllm,) = (Requirement(text) for text in project()["project"]["optional-dependencies"]["gpu"])
    versions = ("0.23.1", "0.24.0", "0.25.1", "0.26.1", "0.27.0", "1.0.0")
    assert [version for version in versions if version in vllm.specifier] == ["0.24.0", "0.25.1", "0.26.1"]
