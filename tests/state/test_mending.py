"""A damaged run goes on from its newest whole state: what is damaged is set aside and named, nothing else happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.state.digests import Damaged, marked, read_sealed, signed, write_sealed
from penstock.state.experience import add_columns, column_names, damaged, write_columns, write_columns_apart
from penstock.state.manifest import (
    Manifest,
    Progress,
    Tracked,
    read_manifest,
    verify_checkpoint,
    write_hashes,
    write_manifest,
)
from penstock.state.mending import mend
from penstock.state.run_folder import RunFolder, append_metrics, read_metrics
from tests.state.checkpoints import CONFIG, write_checkpoint

NAMES = ("000004", "000008", "000012")


def standing(name: str) -> Manifest:
    """The manifest of the checkpoint `name`."""
    done = int(name)
    progress = Progress(done, done, prompt_cursor=8 * done, kl_coefficient=done / 100, seconds=float(done))
    return Manifest(progress, name, "models/initial", tracked=(Tracked("mlflow", "of the checkpoint"),), kind="train")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with three checkpoints, which has gone on in another run of its tracker since the newest."""
    run = RunFolder(tmp_path / "run")
    for number in range(13):
        run.path.mkdir(exist_ok=True)
        append_metrics(run, number, {"loss": float(number)})
    for name in NAMES:
        write_checkpoint(run, standing(name))
    write_manifest(run, dataclasses.replace(standing("000012"), tracked=(Tracked("mlflow", "newer"),)))
    return run


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def halve(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_run_is_left_as_it_is(run: RunFolder) -> None:
    """The control of everything here."""
    before = tree(run.path)
    assert mend(run, "train") == []
    assert tree(run.path) == before


def test_the_checkpoint_before_a_damaged_one_is_taken(run: RunFolder) -> None:
    """Its progress, and the links that the run has now. Damaged twice over, the one before that."""
    flip(run.checkpoint(12) / "state-main-0.safetensors")
    first, then = mend(run, "train")
    assert "state-main-0.safetensors is damaged; set aside as " in first
    assert first.endswith("checkpoints/damaged-000012")
    assert then == f"{run.path} goes on from checkpoint 000008"
    assert read_manifest(run) == dataclasses.replace(standing("000008"), tracked=(Tracked("mlflow", "newer"),))
    assert (run.checkpoints / "damaged-000012" / "state-main-0.safetensors").exists()
    halve(run.checkpoint(8) / "sha256.json")
    assert len(mend(run, "train")) == 2
    assert read_manifest(run).progress == standing("000004").progress
    assert mend(run, "train") == []


def test_a_checkpoint_that_is_gone_is_said(run: RunFolder) -> None:
    """Nothing is there to set aside."""
    run.checkpoint(12).rename(run.path / "elsewhere")
    assert mend(run, "train") == [
        f"checkpoint {run.checkpoint(12)} is gone",
        f"{run.path} goes on from checkpoint 000008",
    ]


@pytest.mark.parametrize("damage", [flip, halve, lambda path: path.write_text("{}"), Path.unlink])
def test_a_lost_manifest_is_that_of_the_newest_whole_checkpoint(run: RunFolder, damage: Callable[[Path], None]) -> None:
    """With its links. Also where that checkpoint is the one before the newest."""
    flip(run.checkpoint(12) / "manifest.json")
    damage(run.manifest)
    said = mend(run, "train")
    assert read_manifest(run) == standing("000008")
    if damage is not Path.unlink:
        assert f"manifest.json is damaged: {said[1].partition('is damaged: ')[2]}" in said[1]
        assert (run.path / "damaged-manifest.json").exists()
    assert said[-1] == f"{run.path} goes on from checkpoint 000008"


def test_without_a_checkpoint_a_lost_manifest_is_that_of_the_beginning(tmp_path: Path) -> None:
    """The configuration is whole. Control: one that is damaged, too, has nothing to be made of."""
    run = RunFolder(tmp_path)
    run.config.write_text(signed(CONFIG), encoding="utf-8")
    write_manifest(run, Manifest(Progress(), kind="train", tracked=(Tracked("mlflow", "m"),)))
    halve(run.manifest)
    said = mend(run, "train")
    assert said[-1] == f"{run.path} goes on from its beginning"
    assert read_manifest(run) == Manifest(Progress(), kind="train")
    run.config.write_text(CONFIG, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.yaml is damaged, or was edited(.|\n)*given to --resume"):
        mend(run, "train")


@pytest.mark.parametrize("also", ["manifest", "nothing else"])
def test_where_nothing_whole_is_left_nothing_happens(run: RunFolder, also: str) -> None:
    """One message names what is damaged."""
    for name in NAMES:
        flip(run.checkpoints / name / "state-main-0.safetensors")
    if also == "manifest":
        flip(run.manifest)
    before = tree(run.path)
    with pytest.raises(
        UserError, match=r"000012/state-main-0\.safetensors is damaged, and no whole checkpoint is left"
    ) as caught:
        mend(run, "train")
    assert not isinstance(caught.value, Damaged)
    assert "start anew in another" in caught.value.remedy
    assert tree(run.path) == before


@pytest.mark.parametrize("start", ["000004", "4"])
def test_a_person_may_choose_the_checkpoint(run: RunFolder, start: str) -> None:
    """Also with the newest whole. Later ones stay until the engines are at the chosen one."""
    assert mend(run, "train", start) == [f"{run.path} goes on from checkpoint 000004"]
    assert read_manifest(run) == dataclasses.replace(standing("000004"), tracked=(Tracked("mlflow", "newer"),))
    mend(run, "train", "12")
    assert read_manifest(run).progress == standing("000012").progress


def test_a_chosen_checkpoint_must_be_there_and_whole(run: RunFolder) -> None:
    """The message has those that there are; nothing has changed."""
    before = tree(run.path)
    for start in ("000005", "five", "../000004", ""):
        if start:
            with pytest.raises(UserError, match="has no checkpoint") as caught:
                mend(run, "train", start)
            assert caught.value.remedy == "there are 000004, 000008, 000012"
    assert tree(run.path) == before
    flip(run.checkpoint(8) / "state-main-0.safetensors")
    before = tree(run.path)
    with pytest.raises(UserError, match=r"state-main-0\.safetensors is damaged(.|\n)*--from 000004 or 000012"):
        mend(run, "train", "8")
    assert tree(run.path) == before


def test_a_damaged_configuration_is_that_of_the_checkpoint(run: RunFolder) -> None:
    """The one in the run folder is kept under another name."""
    run.config.write_text(run.config.read_text(encoding="utf-8").replace("a run", "b run"), encoding="utf-8")
    (said,) = mend(run, "train")
    assert "was edited: its content does not fit its digest; set aside as" in said
    assert run.config.read_text(encoding="utf-8") == signed(CONFIG)
    assert "b run" in (run.path / "damaged-config.yaml").read_text(encoding="utf-8")


def test_lost_figures_are_named(run: RunFolder) -> None:
    """The others stay, and the run goes on."""
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([*lines[:5], lines[5][:40] + b"\n", *lines[6:]]))
    (said,) = mend(run, "train")
    assert "metrics.jsonl is damaged in line 6; set aside as" in said
    assert said.endswith("the figures of 5 are lost")
    assert [record["iteration"] for record in read_metrics(run)] == [n for n in range(13) if n != 5]


def test_damaged_rows_are_made_again_if_it_is_known_from_what(run: RunFolder) -> None:
    """Control: without the note of what made them they are not."""
    rows, note = run.prompts("train"), run.prompts("prompts").with_suffix(".json")
    with marked(rows) as aside:
        aside.write_bytes(b"rows" * 100)
    write_sealed(note, {"seed": 1})
    assert mend(run, "train") == []
    whole = note.read_bytes()
    flip(note)
    (said,) = mend(run, "train")
    assert "prompts.json is damaged" in said
    assert rows.exists()
    note.write_bytes(whole)
    flip(rows)
    (said,) = mend(run, "train")
    assert "train.parquet is damaged; set aside as" in said
    assert not rows.exists()
    assert read_sealed(note) == {"seed": 1}
    rows.write_bytes(b"others")
    flip(note)
    with pytest.raises(UserError, match=r"train\.parquet is damaged, and so is .*prompts\.json"):
        mend(run, "train")


def test_a_damaged_model_of_the_warm_up_is_made_again(run: RunFolder) -> None:
    """Control: the trained one at the end is not looked at; nothing starts from it."""
    for name in ("sft", "final"):
        run.model(name).mkdir(parents=True)
        (run.model(name) / "model.safetensors").write_bytes(bytes(64))
        write_hashes(run.model(name))
    assert mend(run, "train") == []
    flip(run.model("sft") / "model.safetensors")
    (said,) = mend(run, "train")
    assert "sft/model.safetensors is damaged; set aside as" in said
    assert not run.model("sft").exists()
    assert run.model("final").exists()


@pytest.mark.parametrize("which", ["file", "part"])
@pytest.mark.parametrize("damage", [flip, halve])
def test_a_damaged_experience_is_done_again(run: RunFolder, which: str, damage: Callable[[Path], None]) -> None:
    """That of the iteration to come: of earlier ones there are only figures. Control: whole, the responses stay."""
    path = run.experience(13)
    columns = {"response": ["a", "b"], "response_tokens": Ragged.of([[1], [2, 3]], np.int32), "group": np.arange(2)}
    write_columns_apart(path, columns)
    add_columns(path, {"reward": np.ones(2)})
    assert mend(run, "train") == []
    assert damaged(path) is None
    assert set(column_names(path)) == set(columns)  # what was added later is made again
    (part,) = path.parent.glob(".*.part")
    victim = path if which == "file" else part
    damage(victim)
    (said,) = mend(run, "train")
    assert said.startswith(f"{victim} is damaged; set aside as")
    assert not path.exists() or "response_tokens" not in column_names(path)
    assert mend(run, "train") == []


@pytest.mark.parametrize("damage", [flip, halve])
@pytest.mark.parametrize("number", [12, 13])
def test_damaged_responses_that_wait_are_done_without(
    run: RunFolder, number: int, damage: Callable[[Path], None]
) -> None:
    """Those of the last iteration and of the one to come; older ones nobody goes on with. Control: whole, they stay."""
    for each in (11, 12, 13, 14):
        write_columns(run.carried(each), {"tokens": Ragged.of([[1], [2, 3]], np.int32)})
    assert mend(run, "train") == []
    assert [run.carried(each).exists() for each in (11, 12, 13, 14)] == [True, True, True, False]
    damage(run.carried(11))
    damage(run.carried(number))
    (said,) = mend(run, "train")
    assert said.startswith(f"{run.carried(number)} is damaged; set aside as")
    assert not run.carried(number).exists() and run.carried(11).exists()
    assert mend(run, "train") == []


def test_experience_of_later_iterations_goes(run: RunFolder) -> None:
    """They are of policies that are lost; also damaged, they hold nothing up."""
    for number in (9, 10, 13):
        write_columns_apart(run.experience(number), {"response": ["a"], "group": np.arange(1)})
    halve(run.experience(10))
    mend(run, "train", "8")
    assert [path.name for path in run.experience(0).parent.iterdir() if not path.name.startswith(".")] == [
        "000009.parquet"
    ]


def test_the_checkpoint_of_supervised_steps_mends_its_run(tmp_path: Path) -> None:
    """Its manifest gives back kind and links; damaged, nothing whole is left."""
    run = RunFolder(tmp_path)
    run.config.write_text(signed(CONFIG), encoding="utf-8")
    linked = Manifest(Progress(), kind="sft", tracked=(Tracked("mlflow", "m"),), trained_with={"attention": "flash"})
    saved = dataclasses.replace(linked, progress=Progress(iteration=8), checkpoint="000008")
    write_manifest(run, linked)
    write_checkpoint(run.finetuning, saved)
    write_manifest(run.finetuning, saved)
    assert mend(run, "sft") == []
    for manifest in (run.manifest, run.finetuning.manifest):
        halve(manifest)
        mend(run, "train")
        assert (read_manifest(run), read_manifest(run.finetuning)) == (linked, saved)
    assert verify_checkpoint(run.finetuning.checkpoint(8)) == saved
    flip(run.finetuning.checkpoint(8) / "state-main-0.safetensors")
    with pytest.raises(UserError, match="no whole checkpoint is left"):
        mend(run, "sft")
