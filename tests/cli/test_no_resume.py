"""A run that cannot be resumed is refused by the command itself, and one that never began leaves no folder behind.

No server starts for either, and no flow run is left in Prefect.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.checks.tokenized import note_tokenized
from penstock.cli.app import app
from penstock.cli.prefect import server
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.session.session import write_config
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder, locked

BEGINS = """
import sys
from pathlib import Path
from penstock.configs.schema import TrainConfig
from penstock.cli.running import new_folder

folder = new_folder(TrainConfig(folder=sys.argv[1]), Path(sys.argv[3]) if sys.argv[3:] else None)
if sys.argv[2]:
    (folder / sys.argv[2]).touch()
raise KeyboardInterrupt
"""
TINY = {"tiny": {}}
TRAINING = TrainConfig.model_validate(
    {
        "model": {"tiny": {"max_positions": 32}},
        "data": {"arithmetic": {}, "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 16, "kv_cache_gib": 0.01},
        "reward": {"function": "penstock.rewards.builtin:exact_match"},
        "sft": {},
    }
)
PREFERRING = PreferenceConfig.model_validate({"model": TINY, "data": {"train": "pairs.jsonl"}})


@pytest.mark.parametrize(("command", "config"), [("train", TRAINING), ("sft", TRAINING), ("preference", PREFERRING)])
def test_a_run_that_another_process_trains_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, config: TrainConfig | PreferenceConfig
) -> None:
    """Also while its engines start, before it has a manifest. Control: once the other is gone, that is what is said."""
    run = RunFolder(tmp_path)
    write_config(run, config)
    monkeypatch.setattr(server, "start_server", lambda: pytest.fail("a server is started"))
    with locked(run):
        for _ in range(2):
            with pytest.raises(UserError, match="is being trained by another process"):
                app([command, "--resume", str(run.path)], standalone_mode=False)
            write_manifest(run, Manifest(Progress(iteration=1), checkpoint="000001"))
    run.manifest.unlink()
    said = rf"no manifest\.json(.|\n)*start anew with: penstock {command} \S*config\.yaml --run"
    with pytest.raises(UserError, match=said):
        app([command, "--resume", str(run.path)], standalone_mode=False)


@pytest.mark.parametrize("made", ["train", "sft", "preference", "reward-model"])
@pytest.mark.parametrize("command", ["train", "sft", "preference", "reward-model"])
def test_a_run_goes_on_with_the_command_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, command: str
) -> None:
    """Another would record steps as iterations. Control: its own command gets as far as the server."""
    run = RunFolder(tmp_path)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2.", "rejected": "3."}\n', encoding="utf-8")
    preferring = {"model": TINY, "data": {"train": str(pairs)}}
    trees = {"train": TRAINING, "sft": TRAINING, "preference": PreferenceConfig.model_validate(preferring)}
    write_config(run, trees.get(made) or RewardModelConfig.model_validate(preferring))
    write_manifest(run, Manifest(Progress(), kind=made))
    monkeypatch.setattr(server, "start_server", lambda: pytest.fail("a server is started"))

    def reached() -> None:
        raise InterruptedError

    monkeypatch.setattr(server, "check_server", reached)
    if made == command:
        with pytest.raises(InterruptedError):
            app([command, "--resume", str(run.path)], standalone_mode=False)
        return
    with pytest.raises(UserError, match=f"is a run of 'penstock {made}', not of 'penstock {command}'"):
        app([command, "--resume", str(run.path)], standalone_mode=False)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_that_would_tokenize_otherwise_is_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A dry run of a resume promises nothing that the flow refuses. Control: unchanged it gets as far as the server."""
    run = RunFolder(tmp_path)
    write_config(run, TRAINING)
    write_manifest(run, Manifest(Progress(), kind=command))
    note_tokenized(run, {"train": "prompts"}.get(command, command), TRAINING)

    def reached() -> None:
        raise InterruptedError

    monkeypatch.setattr(server, "check_server", reached)
    with pytest.raises(InterruptedError):
        app([command, "--resume", str(run.path)], standalone_mode=False)
    write_config(run, TRAINING.model_copy(update={"seed": 1}))
    with pytest.raises(UserError, match=r"^seed in .* is 1, .* were made with 0"):
        app([command, "--resume", str(run.path)], standalone_mode=False)


@pytest.mark.parametrize("written", ["", "config.yaml"])
def test_a_command_stopped_before_its_flow_leaves_no_empty_folder(tmp_path: Path, written: str) -> None:
    """While Prefect's server starts, say. Control: a folder in which there is something stays."""
    command = [sys.executable, "-c", BEGINS, str(tmp_path / "runs"), written]
    stopped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "run folder: " in stopped.stdout
    assert "KeyboardInterrupt" in stopped.stderr
    assert [path.name for path in (tmp_path / "runs").rglob("*.yaml")] == ([written] if written else [])
    assert len(list((tmp_path / "runs").iterdir())) == len(written[:1])


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    """It may be a mount point, or made for this run. Control: one that the command made is gone again."""
    for name in ("theirs", "ours"):
        run = tmp_path / name
        if name == "theirs":
            run.mkdir()
        command = [sys.executable, "-c", BEGINS, str(tmp_path), "", str(run)]
        stopped = subprocess.run(command, capture_output=True, text=True, check=False)
        assert stopped.stderr.count("Traceback") == 1  # of the interruption
        assert run.exists() == (name == "theirs")
