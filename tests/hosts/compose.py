"""deploy/compose.yaml as a test reads it: words and variables of each service, with the values of an env file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILE, EXAMPLE = DEPLOY / "compose.yaml", DEPLOY / ".env.example"
_VALUE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def services() -> dict[str, dict[str, Any]]:
    """Return the services as they are written."""
    return dict(yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"])


def example() -> dict[str, str]:
    """Return the names and values of the env file that is to be copied."""
    lines = (line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if "=" in line and line[0] != "#")
    return dict(line.split("=", 1) for line in lines)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Fill in values as Docker does; `:-` gives a default, and `:?` stands where there must be one."""

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        if values.get(name):
            return values[name]
        assert kind == "-", f"{name} has no value"
        return str(default)

    return _VALUE.sub(value, text).replace("$$", "$")


@dataclass(frozen=True)
class Service:
    """What a container of a service would run: its words, its variables, and the words that tell its health."""

    words: list[str]
    environment: dict[str, str]
    health: list[str]


def service(name: str, values: Mapping[str, str], folders: Mapping[str, str]) -> Service:
    """Return a service.

    Args:
        folders: what takes the place of the folders of containers.
    """

    def here(text: str) -> str:
        for folder, other in folders.items():
            text = text.replace(folder, other)
        return text

    written = services()[name]
    return Service(
        words=[here(filled(word, values)) for word in [*written.get("entrypoint", []), *written.get("command", [])]],
        environment={key: here(filled(str(value), values)) for key, value in written.get("environment", {}).items()},
        health=[filled(word, values) for word in written.get("healthcheck", {}).get("test", ["CMD"])[1:]],
    )
