"""deploy/compose.yaml, read: nothing here can start containers. That its commands and variables work: tests/hosts/.

Invariants: no password is written in it, nothing is reached from elsewhere unless the env file says so, and a service
starts when those that it needs are well.
"""

from __future__ import annotations

import re
import subprocess

from prefect.settings import Settings
from prefect.settings.legacy import _get_valid_setting_names
from prefect_redis.cleanup_queue import RedisWorkerCleanupQueueSettings
from prefect_redis.client import RedisMessagingSettings

from tests.hosts.compose import DEPLOY, EXAMPLE, FILE, example, filled, services

KEYS = {  # of Compose's own schema, those in use
    *("image", "build", "init", "restart", "user", "entrypoint", "command", "environment", "volumes", "networks"),
    *("network_mode", "ports", "depends_on", "healthcheck"),
}
VALUES = example() | {name: f"{name.lower()}-value" for name, value in example().items() if not value}
SERVICES = services()


def environments() -> dict[str, str]:
    """All variables of all services, as they are written."""
    return {name: str(value) for item in SERVICES.values() for name, value in item.get("environment", {}).items()}


def test_every_part_is_there_and_of_known_shape() -> None:
    assert set(SERVICES) == {"postgres", "redis", "prefect", "prefect-services", "mlflow", "worker"}
    for item in SERVICES.values():
        assert set(item) <= KEYS
        assert all(isinstance(word, str) for word in [*item.get("entrypoint", []), *item.get("command", [])])
    assert all("networks" in item for name, item in SERVICES.items() if name != "worker")


def test_images_are_pinned_or_built_here() -> None:
    """A server of another version than its data or its clients is a surprise of some Monday."""
    for item in SERVICES.values():
        assert item.get("build") == {"context": ".."} or re.search(r":\d+\.\d+(\.\d+)?$", item["image"])


def test_no_password_is_written_in() -> None:
    """Whatever is secret comes from the env file, which git does not know, and has no default there or here."""
    text = FILE.read_text(encoding="utf-8")
    secret = [name for name in example() if name.endswith("_PASSWORD")]
    assert len(secret) == 3 and all(not example()[name] for name in secret)
    assert all(f"${{{name}:?}}" in text and f"${{{name}:-" not in text for name in secret)
    for credentials in re.findall(r"://([^@\s]+)@", text):
        assert re.fullmatch(r"(penstock)?:\$\{\w+_PASSWORD:\?\}", credentials)
    ignored = subprocess.run(["git", "check-ignore", "-q", str(DEPLOY / ".env")], cwd=DEPLOY, check=False)
    known = subprocess.run(["git", "check-ignore", "-q", str(EXAMPLE)], cwd=DEPLOY, check=False)
    assert (ignored.returncode, known.returncode) == (0, 1)


def test_the_env_file_has_all_values_and_no_others() -> None:
    used = set(re.findall(r"\$\{(\w+)", FILE.read_text(encoding="utf-8")))
    assert used == set(example())


def test_nothing_is_reached_from_elsewhere_by_default() -> None:
    """Ports are those of the loopback interface, and databases have none."""
    ports = {name: [filled(port, VALUES) for port in item.get("ports", [])] for name, item in SERVICES.items()}
    assert {name: listed for name, listed in ports.items() if listed} == {
        "prefect": ["127.0.0.1:4200:4200"],
        "mlflow": ["127.0.0.1:5000:5000"],
    }


def test_a_service_waits_for_those_that_it_needs() -> None:
    """Each of these says how it is."""
    for item in SERVICES.values():
        for name, wanted in item.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_prefect_knows_every_variable() -> None:
    """One that is misspelt is passed over without a word. Control: such a one."""
    known = _get_valid_setting_names(Settings)
    for kind in (RedisMessagingSettings, RedisWorkerCleanupQueueSettings):
        known |= {f"{kind.model_config['env_prefix']}{field.upper()}" for field in kind.model_fields}
    named = {name for name in environments() if name.startswith("PREFECT_")}
    assert len(named) > 10 and named <= known
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URI" not in known
