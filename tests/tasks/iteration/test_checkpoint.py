"""What a resume finds in the run folder and what it leaves there, without engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.session.session import Training
from penstock.state.manifest import Manifest, Progress, read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics, read_metrics, truncate_metrics
from penstock.tasks.finetuning.checkpoints import restored, save_step
from penstock.tasks.iteration.checkpoint import newest_kept, restore
from tests.state.checkpoints import write_checkpoint

MakeTraining = Callable[[TrainConfig], Training]


def sealed(run: RunFolder, *iterations: int) -> None:
    """Write checkpoints without weights."""
    for iteration in iterations:
        write_checkpoint(run, Manifest(Progress(iteration=iteration), checkpoint=f"{iteration:06d}"))


def stopped(training: Training, iteration: int) -> RunFolder:
    """Leave a run that was complete once, its manifest at `iteration` and a newer checkpoint that it does not name."""
    run = training.run
    training.session().prompts["train"] = PromptTable(pd.DataFrame({"prompt_id": ["a"]}), 0)
    for number in range(4):
        append_metrics(run, number, {})
    sealed(run, 2, 3)
    write_manifest(run, Manifest(Progress(iteration=iteration), checkpoint=f"{iteration:06d}"))
    run.model("final").mkdir(parents=True)
    (run.model("final") / "model.safetensors").touch()
    run.summary.write_text('{"status": "completed"}')
    return run


@pytest.mark.parametrize(("iteration", "kept"), [(2, False), (3, True)])
def test_the_model_of_an_earlier_attempt_goes_unless_all_iterations_made_it(
    training_with: MakeTraining, iteration: int, kept: bool
) -> None:
    """Raised `iterations`, or a kill after the export: what is trained from here on makes a model of its own."""
    training = training_with(TrainConfig(iterations=3))
    run = stopped(training, iteration)
    assert restore.fn(training).iteration == iteration
    assert run.model("final").exists() == kept
    assert run.summary.exists() == kept
    assert not list(run.path.rglob("*.partial"))


def test_without_a_checkpoint_all_is_made_again(training_with: MakeTraining) -> None:
    """`checkpoint.every=0`, killed between the export and the summary: every iteration is repeated."""
    training = training_with(TrainConfig(iterations=3))
    run = stopped(training, 3)
    run.summary.unlink()
    write_manifest(run, Manifest(Progress()))
    assert restore.fn(training) == Progress()
    assert not run.model("final").exists()
    assert not list(run.checkpoints.iterdir())
    assert read_metrics(run) == []


def test_a_checkpoint_after_that_of_the_manifest_goes(training_with: MakeTraining) -> None:
    """Sealed by an attempt that was killed before its manifest moved; the manifest's own stays."""
    training = training_with(TrainConfig(iterations=5))
    run = stopped(training, 2)
    restore.fn(training)
    assert [path.name for path in run.checkpoints.iterdir()] == ["000002"]
    assert read_manifest(run).checkpoint == "000002"


def test_a_checkpoint_before_those_that_are_kept_goes(training_with: MakeTraining) -> None:
    """The last one was named by the manifest, and a kill came before it was pruned. Control: one more may be kept."""
    for keep, left in ((2, ["000002", "000003"]), (1, ["000003"])):
        training = training_with(TrainConfig.model_validate({"iterations": 3, "checkpoint": {"keep": keep}}))
        run = stopped(training, 3) if keep == 2 else training.run
        training.session().prompts["train"] = PromptTable(pd.DataFrame({"prompt_id": ["a"]}), 0)
        restore.fn(training)
        assert sorted(path.name for path in run.checkpoints.iterdir()) == left


@pytest.mark.parametrize(
    ("held", "named", "goes_on_from"),
    [
        ({2, 3}, 2, 3),  # the newest that is recorded
        ({3, 4}, 2, 3),  # iteration 4 was being recorded
        ({2}, 2, 2),  # memory is faster than files
        ({1}, 2, None),  # of before the checkpoint
        (set(), 2, None),  # the host is new
        ({5, 6}, 4, 5),  # the checkpoint of 6 was being written
        ({5, 6}, 6, 6),
    ],
)
def test_a_training_goes_on_from_its_newest_snapshot(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, held: set[int], named: int, goes_on_from: int | None
) -> None:
    """One of which nothing is missing: neither its figures nor its checkpoint. Control: those that are missing."""
    training = training_with(TrainConfig.model_validate({"checkpoint": {"every": 2}}))
    session = training.session()
    for number in range(4 if named == 2 else 7):
        append_metrics(training.run, number, {})

    def newest(_: object, __: str, at_most: int) -> int | None:
        return max((number for number in held if number <= at_most), default=None)

    monkeypatch.setattr(type(session), "newest_snapshot", newest)
    saved = Manifest(Progress(iteration=named), checkpoint=f"{named:06d}")
    assert newest_kept(training, saved) is None  # of another process
    session.reached = {number: Progress(iteration=number) for number in held}
    kept = newest_kept(training, saved)
    assert (None if kept is None else kept.iteration) == goes_on_from


def test_steps_after_those_of_the_manifest_go_as_well(training_with: MakeTraining) -> None:
    """Of offline training: the first checkpoint was sealed, and no manifest ever named it.

    So do their figures. Control: not those of another record.
    """
    training = training_with(TrainConfig())
    run, folder = training.run, training.run.finetuning
    assert restored.fn(training, run, "sft") == 0
    sealed(folder, 200)
    for record in (run, run.warm_up):
        truncate_metrics(record, -1)
        append_metrics(record, 1, {"loss": 1.0})
    assert restored.fn(training, run.warm_up, "sft") == 0
    assert not list(folder.checkpoints.iterdir())
    assert read_metrics(run.warm_up) == []
    assert [record["iteration"] for record in read_metrics(run)] == [1]
    assert restored.fn(training, run, "sft") == 0
    assert read_metrics(run) == []


def test_seconds_of_an_attempt_without_rollout_are_kept(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of steps notes them where the next attempt looks. Control: what the run stands at is unchanged."""
    training = training_with(TrainConfig())
    session, run = training.session(), training.run
    write_manifest(run, Manifest(Progress(), kind="sft"))
    session.seconds_before = 1000.0
    session.snapshots = False
    monkeypatch.setattr(type(session), "call", lambda _, role, command, key: (Path(command.folder) / "state").touch())
    save_step.fn(training, 7)
    saved = read_manifest(run)
    assert saved.progress.seconds > 1000.0
    assert saved == Manifest(Progress(seconds=saved.progress.seconds), kind="sft")
    assert read_manifest(run.finetuning).progress.iteration == 7
