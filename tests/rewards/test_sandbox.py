"""A sandbox: what reward functions do beyond it fails alone and is named, and works without one (the control)."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.rewards.pool import RewardPool, Score
from penstock.rewards.source import check_source
from penstock.rewards.types import Sample
from penstock.usercode.sandbox import GIB, obstacle
from tests.rewards.sandboxed_rewards import children_without_end, evil

pytestmark = pytest.mark.skipif(bool(obstacle()), reason="no sandbox on this machine")

FAILED = -1.5
SMALL = {"memory_gib": 0.5, "processes": 8}
Scoring = Callable[[str], Score]


def config_of(sandbox: dict[str, Any] | None, timeout_s: float = 20.0) -> RewardConfig:
    return RewardConfig(
        function="sandboxed_rewards:act", workers=1, timeout_s=timeout_s, failure_value=FAILED, sandbox=sandbox
    )


def scoring(pool: RewardPool) -> Scoring:
    return lambda response: pool.score([Sample("s", "0", "", response, {})])[0]


@pytest.fixture(scope="module")
def boxed(in_this_folder: None) -> Iterator[Scoring]:
    with RewardPool(config_of(SMALL), []) as pool:
        yield scoring(pool)


@pytest.fixture(scope="module")
def free(in_this_folder: None) -> Iterator[Scoring]:
    with RewardPool(config_of(None), []) as pool:
        yield scoring(pool)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_scores_are_the_same_numbers(boxed: Scoring, free: Scoring) -> None:
    for number in (0.1, 1 / 3, -1e12, 5e-324, 3.0):
        assert boxed(f"number:{number!r}") == free(f"number:{number!r}") == Score(number, {}, None)


def test_there_is_no_network_unless_it_is_asked_for(boxed: Scoring, free: Scoring, port: int) -> None:
    deed = f"connect:{port}"
    assert boxed(deed).reward == FAILED
    assert "ConnectionRefusedError" in (boxed(deed).failure or "")
    assert free(deed).reward == 1.0
    with RewardPool(config_of(SMALL | {"network": True}), []) as pool:
        assert scoring(pool)(deed).reward == 1.0


def test_files_are_read_only_and_temporary_ones_are_its_own(boxed: Scoring, free: Scoring, tmp_path: Path) -> None:
    for place in (Path.cwd() / "written.txt", tmp_path / "written.txt", Path("/written.txt")):
        assert (boxed(f"write:{place}").failure or "").startswith(("OSError", "FileNotFoundError")), place
        assert not place.exists()
    assert free(f"write:{tmp_path / 'written.txt'}").reward == 1.0
    assert boxed("temporary").reward == 1.0
    assert not Path("/tmp/penstock-of-a-sandbox").exists()


def test_of_other_folders_it_sees_what_the_recipe_names_and_nothing_of_the_run(tmp_path: Path) -> None:
    """What it prints arrives all the same; the control is the sandbox of the other tests, which names no folder."""
    (words := tmp_path / "words.txt").write_text("one")
    (run := tmp_path / "runs" / "first").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1")
    (log := run / "logs" / "reward.log").parent.mkdir()
    with RewardPool(config_of(SMALL | {"read": [str(tmp_path)]}), [], log) as pool:
        score = scoring(pool)
        assert score(f"read:{words}").reward == 1.0
        assert (score(f"read:{run / 'config.yaml'}").failure or "").startswith("FileNotFoundError")
        assert (score(f"write:{words}").failure or "").startswith("OSError")
        assert score("print:a word").reward == 1.0
    assert log.read_text() == "a word\n"
    with RewardPool(config_of(SMALL), []) as pool:
        assert (scoring(pool)(f"read:{words}").failure or "").startswith("FileNotFoundError")


def test_variables_stay_outside_unless_the_recipe_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "a key")
    for sandbox, has in ((SMALL, 0.0), (SMALL | {"variables": ["PENSTOCK_TEST_SECRET"]}, 1.0), (None, 1.0)):
        with RewardPool(config_of(sandbox), []) as pool:
            assert scoring(pool)("secret").reward == has


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        (f"allocate:{GIB}", "MemoryError"),
        (f"share:{GIB}", "more memory than its sandbox allows (sandbox.memory_gib)"),
        ("fork:30", "more processes than its sandbox allows (sandbox.processes)"),
        ("die", "exit code 7"),
        ("surrogate", "ValueError: half a pair: ?"),
    ],
)
def test_what_uses_too_much_fails_alone_and_is_named(deed: str, reason: str, boxed: Scoring, free: Scoring) -> None:
    """With `memory_gib` and `processes` as above; the next call finds a worker again. Without a sandbox it may."""
    score = boxed(deed)
    assert score.reward == FAILED
    assert reason in (score.failure or "")
    assert boxed("number:1").reward == 1.0
    if deed.startswith(("allocate", "fork")):
        assert free(deed).reward == 1.0


def test_children_without_end_are_ended(free: Scoring) -> None:
    """Those that a call leaves end with it, the module's server stays until the worker ends. Control: they stay."""
    before = children_without_end()
    with RewardPool(config_of(SMALL | {"processes": 64}, timeout_s=2.0), []) as pool:
        score = scoring(pool)
        assert [score("leave").reward for _ in range(3)] == [1.0] * 3
        assert (score("count").reward, score("server").reward) == (1.0, 1.0)
        assert len(children_without_end() - before) == 1
        assert "timed out" in (score("forever").failure or "")
        assert score("number:1").reward == 1.0
    assert children_without_end() == before
    assert free("leave").reward == 1.0
    assert len(children_without_end() - before) == 1


def test_what_comes_out_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code may write to the worker's own pipe: that is no reply. Control: who unpickles it has run it."""
    monkeypatch.setenv("PENSTOCK_TEST_PLACE", str(tmp_path))
    with RewardPool(config_of(SMALL | {"variables": ["PENSTOCK_TEST_PLACE"]}), []) as pool:
        assert "gave a reply that is none" in (scoring(pool)("lie").failure or "")
        assert scoring(pool)("number:1").reward == 1.0
    assert not (tmp_path / "escaped").exists()
    pickle.loads(evil())
    assert (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("bwrap", "reason"),
    [
        (None, "bubblewrap (bwrap) is not installed"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
    ],
)
def test_a_sandbox_that_cannot_be_made_is_refused_before_a_start(
    bwrap: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bwrap is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"reward\.sandbox: no sandbox on this machine") as refused:
        check_source(config_of(SMALL), [])
    assert reason in refused.value.problem
    assert "install bubblewrap" in refused.value.remedy
    check_source(config_of(None), [])


def test_a_module_that_does_not_load_inside_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It loads here, where there is more to be seen."""
    (data := tmp_path / "data.txt").write_text("1")
    monkeypatch.setenv("PENSTOCK_TEST_PLACE", str(data))
    config = config_of(SMALL).model_copy(update={"function": "outside_reward:score"})
    with RewardPool(config, []) as pool, pytest.raises(UserError, match="not in a worker process"):
        pool.score([Sample("s", "0", "", "", {})])
    assert "KeyError: 'PENSTOCK_TEST_PLACE'" in capfd.readouterr().err
