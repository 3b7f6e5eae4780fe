"""Nothing is written into a run folder before its lock is held, and a refused resume has changed nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.checks.memory import NOWHERE
from penstock.checks.model import attention
from penstock.configs.schema import TrainConfig
from penstock.data.source import rows_of
from penstock.session import opening
from penstock.session.opening import SFT, TRAIN, Resume, is_complete, looked_at, opened, resume_of, sized
from penstock.session.session import read_config, write_config
from penstock.state.manifest import Manifest, Progress, read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, locked
from tests.state.checkpoints import write_checkpoint

CONFIG = TrainConfig(iterations=4)
Files = dict[str, bytes]


KIND = replace(TRAIN, check=lambda _: None, first=lambda _: None)  # without data, and without a server


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with two checkpoints, of iterations 1 and 2."""
    run = RunFolder(tmp_path / "run")
    write_config(run, CONFIG)
    for number in (1, 2):
        saved = Manifest(Progress(iteration=number), checkpoint=f"00000{number}", kind="train")
        write_checkpoint(run, saved)
        write_manifest(run, saved)
    run.lock.touch()
    return run


def files(run: RunFolder) -> Files:
    """Every file of a run with its content."""
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def go_on(run: RunFolder, start: str | None = None, *changes: str) -> TrainConfig:
    """Resume a run without engines; return the configuration that is in force."""
    with (
        disable_run_logger(),
        opened(KIND, TrainConfig(), None, Resume(run.path, start, changes)) as (config, _),
    ):
        with pytest.raises(UserError, match="is being trained"), locked(run):
            pass
        return config


def test_of_two_resumes_the_refused_one_has_changed_nothing(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looked before either held the lock. Control: alone, it changes the configuration."""
    monkeypatch.setattr(opening, "check_resumable", lambda *_: None)
    before = files(run)
    with locked(run), pytest.raises(UserError, match="is being trained by another process"):
        go_on(run, None, "iterations=6")
    assert files(run) == before
    assert go_on(run, None, "iterations=6").iterations == 6
    assert read_config(run).iterations == 6


@pytest.mark.parametrize("start", [None, "1"])
def test_a_damaged_run_is_whole_before_anything_of_it_is_believed(run: RunFolder, start: str | None) -> None:
    """The command line looks without mending: there the run is not complete, whatever it says."""
    run.model("final").mkdir(parents=True)
    run.summary.write_text(json.dumps({"status": "completed"}), encoding="utf-8")
    assert is_complete(TRAIN, Resume(run.path, None, ["iterations=2"]))
    assert not is_complete(TRAIN, Resume(run.path, "1", ["iterations=2"]))
    run.manifest.write_bytes(run.manifest.read_bytes()[:100])
    before = files(run)
    assert not is_complete(TRAIN, Resume(run.path, None, ["iterations=2"]))
    assert files(run) == before
    assert go_on(run, start, "iterations=3").iterations == 3
    assert read_manifest(run).progress.iteration == (1 if start else 2)


def test_a_run_may_go_on_elsewhere(run: RunFolder) -> None:
    """On other ranks, in other groups, at another ZeRO stage. Control: the test below."""
    groups = "groups={main: {roles: [actor, rollout], ranks: 2}}"
    changed = go_on(run, None, groups, "actor.zero_stage=3")
    assert (changed.groups["main"].ranks, changed.actor.zero_stage) == (2, 3)
    assert go_on(run, None, "groups.main.ranks=4").groups["main"].ranks == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [(("iterations=1",), "has done 2 already"), (("seed=1",), "cannot change"), (("iterations",), "is not section")],
)
def test_a_change_that_cannot_be_is_refused_under_the_lock_as_well(
    run: RunFolder, changes: tuple[str, ...], said: str
) -> None:
    """A form on a server gives it to the flow alone. From an earlier checkpoint fewer may be asked for."""
    before = files(run)
    with pytest.raises(UserError, match=said):
        go_on(run, None, *changes)
    assert files(run) == before
    assert go_on(run, "1", "iterations=1").iterations == 1


def test_a_new_run_is_written_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands may have found the folder empty: one begins. Control: a lock alone takes no folder."""
    run = RunFolder(tmp_path / "run")
    make: Callable[..., RunFolder] = opening.new_run_folder

    def begun_meanwhile(*arguments: object) -> RunFolder:
        made = make(*arguments)
        write_config(made, TrainConfig(iterations=9))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(opening, "new_run_folder", begun_meanwhile)
        with pytest.raises(UserError, match="already holds a run"), opened(KIND, CONFIG, str(run.path), None):
            pass
    assert read_config(run).iterations == 9
    run.config.unlink()
    assert run.lock.exists()
    with opened(KIND, CONFIG, str(run.path), None) as (_, begun):
        assert read_config(begun).iterations == 4
        with pytest.raises(UserError, match="is being trained"), locked(run):
            pass


def test_the_start_says_what_a_new_run_never_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, key by key. Controls: of what it reaches nothing is said, and nothing of a run that goes on.

    The file of a run has every key, so what it says of a resume would be of values that nobody gave.
    """
    monkeypatch.setattr(opening, "get_run_logger", lambda: logging.getLogger("opening"))
    tree = {"iterations": 3, "checkpoint": {"every": 2}, "evaluate": {"every": 4}}
    with opened(KIND, TrainConfig.model_validate(tree), str(tmp_path / "run"), None) as (_, run):
        assert caplog.messages == ["'evaluate.every' (4) has no effect: the training has 3 iterations"]
    caplog.clear()
    write_manifest(run, Manifest(Progress(), kind="train"))
    with opened(KIND, TrainConfig(), None, Resume(run.path)) as (config, _):
        assert config.record.samples_every > config.iterations
    assert caplog.messages == []


def test_a_checkpoint_that_is_not_there_is_said_before_anything_starts(run: RunFolder) -> None:
    """A command that looks says it, as the flow does. Control: one that is there, with or without its zeros."""
    for start in ("9", "two"):
        with pytest.raises(UserError, match=f"has no checkpoint {start}") as caught:
            looked_at(KIND, Resume(run.path, start))
        assert caught.value.remedy == "there are 000001, 000002"
    for start in ("1", "000001"):
        assert looked_at(KIND, Resume(run.path, start)) == CONFIG


def test_what_a_command_looks_at_is_what_is_opened(run: RunFolder) -> None:
    """It holds no lock and writes nothing. Controls: a damaged run has no configuration yet, another kind's none."""
    before = files(run)
    looked = looked_at(KIND, Resume(run.path, None, ["iterations=6"]))
    assert files(run) == before
    assert looked == go_on(run, None, "iterations=6")
    with pytest.raises(UserError, match="is a run of 'penstock train', not of 'penstock sft'"):
        looked_at(SFT, Resume(run.path))
    run.config.write_bytes(run.config.read_bytes().replace(b"6", b"7", 1))
    assert looked_at(KIND, Resume(run.path)) is None


def test_a_folder_that_nobody_named_has_the_name_of_its_kind(tmp_path: Path) -> None:
    """What must be there before it is a run is done before. Control: the check comes first, and leaves no folder."""
    config = TrainConfig(folder=str(tmp_path), name="mine")
    seen: list[bool] = []
    kind = replace(KIND, suffix="-sft", first=lambda run: seen.append(run.config.is_file()))
    with opened(kind, config, None, None) as (_, run):
        assert run.name.startswith("mine-sft-")
        assert (seen, run.config.is_file()) == ([False], True)

    def refuse(_: object) -> None:
        raise UserError("not so", "but so")

    with pytest.raises(UserError, match="not so"), opened(replace(kind, check=refuse), config, None, None):
        pass
    assert list(tmp_path.iterdir()) == [run.path]


def test_heads_that_a_rollout_cannot_compute_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flow itself, which a form on a server starts, and in a resume. Controls: heads of 32; a GPU; `sft`."""
    monkeypatch.setattr(attention, "visible_gpus", lambda: [])
    small, right = (
        TrainConfig.model_validate(
            {
                "model": {"tiny": {"hidden_size": size, "heads": 2, "kv_heads": 1}},
                "data": {"arithmetic": {"digits": 1, "sft": 8, "train": 8, "heldout": 8}, "max_prompt_tokens": 16},
                "reward": {"function": "penstock.rewards.builtin:exact_match"},
                "sft": {"steps": 1},
            }
        )
        for size in (32, 64)
    )
    kind, said = replace(TRAIN, first=lambda _: None), "heads of 16 numbers; on a CPU, vLLM computes 32"
    with pytest.raises(UserError, match=said), opened(kind, small, str(tmp_path / "run"), None):
        pass
    assert not (tmp_path / "run").exists()
    with opened(kind, right, str(tmp_path / "run"), None) as (_, run):
        write_manifest(run, Manifest(Progress(), kind="train"))
    assert looked_at(kind, Resume(run.path)) == right
    write_config(run, small)
    with pytest.raises(UserError, match=said):
        looked_at(kind, Resume(run.path))
    SFT.check(small)
    monkeypatch.setattr(attention, "visible_gpus", lambda: [0])
    assert looked_at(kind, Resume(run.path)) == small


def test_the_rows_that_a_check_read_are_kept_while_a_run_is_opened(tmp_path: Path) -> None:
    """Control: not once it has ended."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    kind = replace(KIND, check=lambda _: rows_of(path))
    with opened(kind, CONFIG, str(tmp_path / "run"), None):
        path.write_text('{"prompt": "1+1="}\n' * 2, encoding="utf-8")
        assert len(rows_of(path)) == 1
    assert len(rows_of(path)) == 2


@pytest.mark.parametrize("named", [True, False])
def test_a_flow_run_that_is_run_again_goes_on_with_its_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """By the folder of its form, else by the tag that its first attempt left. Controls: the first attempt; no run."""
    config, folder = TrainConfig(folder=str(run.path.parent)), str(run.path) if named else None
    monkeypatch.setattr(opening, "flow_run", SimpleNamespace(run_count=1, tags=["algorithm:grpo", f"run:{run.name}"]))
    assert resume_of(config, folder, None) is None
    assert resume_of(config, None, str(run.path), "000001", ["iterations=9"]) == Resume(
        run.path, "000001", ["iterations=9"]
    )
    monkeypatch.setattr(opening.flow_run, "run_count", 2)
    assert resume_of(config, folder, None) == Resume(run.path)
    assert resume_of(config, None, str(run.path), "000001") == Resume(run.path)  # and does not go back once more
    run.manifest.unlink()
    assert resume_of(config, folder, None) is None


@pytest.mark.parametrize(("deployment", "begun"), [("d", True), ("", True), ("d", False)])
def test_a_deployments_run_that_fails_says_how_it_goes_on(
    deployment: str, begun: bool, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its page, where no command line adds it; with the folder for both. Controls: a command's run, and one that has
    nothing to go on from."""
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", deployment)
    with pytest.raises(ZeroDivisionError) as caught, disable_run_logger(), opened(KIND, CONFIG, None, Resume(run.path)):
        if not begun:
            run.manifest.unlink()
        raise ZeroDivisionError
    notes = getattr(caught.value, "__notes__", [])
    if not (deployment and begun):
        assert notes == []
        return
    (note,) = notes
    assert note == (f"It goes on with: penstock train --resume {run.path}, or this deployment with 'resume' {run.path}")


GIB = 1 << 30
RECOMPUTED = {"gradient_checkpointing": True}  # else the estimate spares that first
LEFT_TO_MEMORY = {"micro_batch_tokens": None, **RECOMPUTED}
ROOM = {"max_response_tokens": 512, "max_sequences": 8, "kv_cache_gib": 0.01}
MODEL = {"tiny": {"hidden_size": 256, "layers": 8, "heads": 4, "kv_heads": 4, "max_positions": 1024}}


def recipe(**sections: object) -> TrainConfig:
    """A recipe of a small model, whose activations are most of what it needs."""
    return TrainConfig.model_validate({"model": MODEL, "rollout": ROOM, **sections})


def test_micro_batches_are_what_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real estimate, which refuses twice as many. Controls: with room they are the most; a number is obeyed."""
    said: list[str] = []
    monkeypatch.setattr(memory, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 50)
    roomy = recipe(actor=LEFT_TO_MEMORY)
    (estimate,) = sized(TRAIN, roomy, NOWHERE, said.append)
    assert roomy.actor.micro_batch_tokens == recipe().actor.micro_batch_tokens == 16384
    monkeypatch.setattr(memory, "free_host_bytes", lambda: estimate.memory.total - 1)
    with pytest.raises(UserError, match="needs about"):
        sized(TRAIN, recipe(actor=RECOMPUTED), NOWHERE, said.append)
    less = recipe(actor=LEFT_TO_MEMORY)
    sized(TRAIN, less, NOWHERE, said.append)
    tokens = less.actor.micro_batch_tokens
    assert isinstance(tokens, int) and tokens < 16384
    with pytest.raises(UserError, match="needs about"):
        sized(TRAIN, recipe(actor={"micro_batch_tokens": 2 * tokens, **RECOMPUTED}), NOWHERE, said.append)
    assert said == [f"memory has room for micro-batches of {many:,} tokens" for many in (16384, tokens)]


def test_memory_decides_for_all_that_leave_it_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one with a number; where nothing fits the refusal is the estimate's. Control: nothing is left to it."""
    asked: list[tuple[object, ...]] = []

    def limited(config: TrainConfig, _: object) -> list[memory.GroupEstimate]:
        assert config.sft is not None
        tokens = (config.actor.micro_batch_tokens, config.sft.micro_batch_tokens)
        asked.append(tokens)
        if tokens[0] > most:  # type: ignore[operator]
            raise memory.NoRoom("needs about 2 GiB", "use more ranks")
        return []

    kind, most = replace(TRAIN, memory=limited), 5000
    config = recipe(actor=LEFT_TO_MEMORY, sft={"micro_batch_tokens": 123, "max_tokens": 64})
    sized(kind, config, NOWHERE, str)
    assert asked == [(16384, 123), (8192, 123), (4096, 123), (4096, 123)]
    most = 0
    with pytest.raises(memory.NoRoom, match="needs about 2 GiB"):
        sized(kind, recipe(actor=LEFT_TO_MEMORY, sft={"max_tokens": 64}), NOWHERE, str)
    asked.clear()
    with pytest.raises(memory.NoRoom):
        sized(kind, recipe(sft={"max_tokens": 64}), NOWHERE, str)
    assert asked == [(16384, 16384)]
