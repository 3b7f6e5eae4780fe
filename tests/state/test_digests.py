"""No flipped bit and no cut gets through: what a resume reads is what was written, or it is named as damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.state.digests import (
    Damaged,
    check_signed,
    is_whole,
    marked,
    read_sealed,
    remove,
    set_aside,
    signed,
    write_sealed,
)
from penstock.state.experience import add_columns, consolidate, damaged, drop_later_parts, read_columns, with_parts
from penstock.state.experience import write_columns_apart as write_apart
from penstock.state.manifest import (
    FORMAT,
    Manifest,
    Progress,
    Tracked,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from penstock.state.run_folder import RunFolder, append_metrics, damaged_metrics, keep_whole_metrics, read_metrics
from tests.state.checkpoints import write_checkpoint

MANIFEST = Manifest(
    Progress(12, 12, prompt_cursor=96, kl_coefficient=0.02, seconds=61.5, overrides={"rollout.temperature": 0.9}),
    checkpoint="000012",
    model="/runs/a/models/initial",
    tracked=(Tracked("mlflow", "0f" * 16),),
    kind="train",
)
RANDOM = 1000  # flips, and as many cuts, of a large file
SOME = 150  # where every single one would take long and show nothing more


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """An empty run folder."""
    return RunFolder(tmp_path)


def flips(path: Path, count: int | None = None) -> Iterator[int]:
    """Leave `path` with one bit flipped, every one in turn or `count` random ones; at the end it is whole again."""
    whole, source = path.read_bytes(), random.Random(0)
    bits = range(8 * len(whole)) if count is None else [source.randrange(8 * len(whole)) for _ in range(count)]
    for bit in bits:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(content))
        yield bit
    path.write_bytes(whole)


def cuts(path: Path, count: int | None = None) -> Iterator[int]:
    """Leave `path` cut short, at every length in turn or at `count` random ones."""
    whole, source = path.read_bytes(), random.Random(1)
    lengths = range(len(whole)) if count is None else [source.randrange(len(whole)) for _ in range(count)]
    for length in lengths:
        path.write_bytes(whole[:length])
        yield length
    path.write_bytes(whole)


def all_refused(path: Path, read: Callable[[], object], count: int | None = None) -> int:
    """Damage `path` in every way and let `read` refuse it; return in how many. Undamaged it is read."""
    read()
    ways = 0
    for damage in (flips, cuts):
        for place in damage(path, count):
            ways += 1
            try:
                found = read()
            except Damaged as error:
                assert path.name in error.problem  # noqa: PT017
            else:
                pytest.fail(f"{damage.__name__} at {place} is read as {found}")
    read()
    return ways


# ---- small files ---------------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_noticed(run: RunFolder) -> None:
    """Among them that of `prompt_cursor` from 96 to 104, and half a manifest."""
    write_manifest(run, MANIFEST)
    assert read_manifest(run) == MANIFEST
    assert all_refused(run.manifest, lambda: read_manifest(run)) > 3300
    text = run.manifest.read_text(encoding="utf-8")
    assert '"prompt_cursor": 96' in text
    run.manifest.write_text(text.replace('"prompt_cursor": 96', '"prompt_cursor": 104'), encoding="utf-8")
    with pytest.raises(Damaged, match="does not fit its digest"):
        read_manifest(run)


@pytest.mark.parametrize(
    "values",
    [{}, {"progress": None}, {"progress": {"iteration": "many"}}, {"progress": {}, "other": 1}, {"progress": [1]}],
)
def test_a_manifest_of_missing_or_wrong_fields_is_damaged_also_with_a_fitting_digest(
    run: RunFolder, values: dict[str, object]
) -> None:
    """No traceback, and no value of another type. Control: one with its progress alone is read."""
    write_sealed(run.manifest, {"format": FORMAT, "progress": {}})
    assert read_manifest(run) == Manifest(Progress())
    write_sealed(run.manifest, {"format": FORMAT, **values})
    with pytest.raises(Damaged, match="is damaged"):
        read_manifest(run)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "1", "[" * 100_000, "", "\udc80"])
def test_any_other_text_is_damaged(run: RunFolder, text: str) -> None:
    """Whatever JSON it may be, or not."""
    run.manifest.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Damaged):
        read_manifest(run)


def test_every_flipped_bit_and_every_cut_of_a_configuration_is_noticed(tmp_path: Path) -> None:
    """Also an edit by hand. Control: comments and values of any kind are whole."""
    path = tmp_path / "config.yaml"
    path.write_text(signed("name: größer  # a comment\nseed: 1\n"), encoding="utf-8")
    all_refused(path, lambda: check_signed(path))
    path.write_text(path.read_text(encoding="utf-8").replace("seed: 1", "seed: 2"), encoding="utf-8")
    with pytest.raises(Damaged, match="was edited"):
        check_signed(path)


def test_a_schedule_and_text_come_back_from_a_sealed_file(tmp_path: Path) -> None:
    """Keys that JSON makes text of, and characters that it escapes, fit their digest."""
    path = tmp_path / "note.json"
    write_sealed(path, {"schedule": {0: 1.0, 10: 2.0, 9: 3.0}, "text": "\u00e4\ud83d\ude00", "none": None})
    assert read_sealed(path)["schedule"] == {"0": 1.0, "10": 2.0, "9": 3.0}
    all_refused(path, lambda: read_sealed(path), SOME)


def test_of_a_damaged_record_the_whole_lines_stay(run: RunFolder) -> None:
    """Every flip is named or changes nothing: that of the last line's end. Lines of others are as they were."""
    for number in (0, 1, 2):
        append_metrics(run, number, {"loss": 0.5 + number, "reward/mean": 1e-7})
    whole = read_metrics(run)
    for place in flips(run.metrics, 4 * SOME):
        if not (wrong := damaged_metrics(run)):
            assert read_metrics(run) == whole, place
            continue
        with pytest.raises(Damaged, match=rf"metrics\.jsonl is damaged in line {wrong[0]}"):
            read_metrics(run)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0] + lines[1].replace(b"1.5", b"1.6") + lines[2])
    aside = keep_whole_metrics(run)
    assert read_metrics(run) == [whole[0], whole[2]]
    assert b"1.6" in aside.read_bytes()


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_flipped_bits_and_cuts_of_a_checkpoint_are_noticed(run: RunFolder) -> None:
    """Of its weights, its manifest, its configuration, and of the hashes themselves."""
    folder = write_checkpoint(run, MANIFEST)
    for file in ("state-main-0.safetensors", "manifest.json", "config.yaml", "prompts.jsonl"):
        all_refused(folder / file, lambda: verify_checkpoint(folder), SOME)
    for damage in (flips, cuts):
        for place in damage(folder / "sha256.json", 2 * SOME):
            try:
                found = verify_checkpoint(folder)
            except Damaged as error:
                assert "000012" in error.problem  # noqa: PT017
            else:
                pytest.fail(f"{damage.__name__} at {place} is read as {found}")
    assert verify_checkpoint(folder) == MANIFEST


@pytest.mark.parametrize(
    ("hashes", "problem"),
    [
        ("{}", "names no file"),
        ("[]", "names no file"),
        ('{"config.yaml": "0"}', "is none of the files"),
        (None, "is missing"),
    ],
)
def test_hashes_of_other_files_than_those_there_are_refused(run: RunFolder, hashes: str | None, problem: str) -> None:
    """None, one alone, or one too many would leave files unlooked at."""
    folder = write_checkpoint(run, MANIFEST)
    path = folder / "sha256.json"
    listed = json.loads(path.read_bytes())
    if hashes is None:
        path.unlink()
    else:
        path.write_text(hashes)
    with pytest.raises(Damaged, match=problem):
        verify_checkpoint(folder)
    path.write_text(json.dumps(listed))
    verify_checkpoint(folder)
    (folder / "more.pt").touch()
    with pytest.raises(Damaged, match=r"more\.pt is none of the files"):
        verify_checkpoint(folder)


def test_a_checkpoint_under_another_name_is_refused(run: RunFolder) -> None:
    """Its manifest would send a resume to a folder that is not there."""
    folder = write_checkpoint(run, MANIFEST)
    folder.rename(other := folder.with_name("000013"))
    with pytest.raises(Damaged, match="manifest of checkpoint 000012"):
        verify_checkpoint(other)


# ---- experience ----------------------------------------------------------------------------------------------------


def rollout(path: Path) -> dict[str, object]:
    """Write an experience as a rollout does, its tokens and texts in a part."""
    tokens = Ragged.of([list(range(row, row + 60)) for row in range(8)], np.int32)
    columns = {"prompt": [f"prompt {row}" for row in range(8)], "response_tokens": tokens, "group": np.arange(8)}
    write_apart(path, columns, {"seed": 1})
    return columns


@pytest.mark.parametrize("which", ["part", "file", "consolidated"])
def test_flipped_bits_and_cuts_of_an_experience_are_noticed(run: RunFolder, which: str) -> None:
    """Thousands of random ones: the file that has one is named, before anything in it is believed."""
    path = run.experience(3)
    rollout(path)
    if which == "consolidated":
        consolidate(path)
        assert not with_parts(path.parent)
    (victim,) = path.parent.glob(".*.part") if which == "part" else [path]
    assert damaged(path) is None
    for damage in (flips, cuts):
        for place in damage(victim, RANDOM):
            assert damaged(path) == victim, (damage, place)
    assert damaged(path) is None


def test_what_was_added_later_is_not_taken_over(run: RunFolder) -> None:
    """It has no digest, for whose making a step would wait. Control: what the file was written with stays."""
    path = run.experience(3)
    columns = rollout(path)
    add_columns(path, {"reward": np.ones(8)})
    assert damaged(path) is None
    drop_later_parts(path)
    with pytest.raises(KeyError, match="reward"):
        read_columns(path, ["reward"])
    assert read_columns(path, ["prompt"])["prompt"] == columns["prompt"]
    consolidate(path)
    add_columns(path, {"reward": np.ones(8)})
    drop_later_parts(path)
    assert not with_parts(path.parent)
    assert read_columns(path, ["prompt"])["prompt"] == columns["prompt"]


# ---- marks ---------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_before_and_after_it_is_replaced(tmp_path: Path) -> None:
    """A crash between the mark and the new name leaves the old file whole. Control: another content is not."""
    path = tmp_path / "rows"
    for content in ("old", "new"):
        with marked(path) as aside:
            aside.write_text(content)
            assert path.exists() == (content == "new")
            assert is_whole(path) == (content == "new")
        assert is_whole(path)
    path.write_text("older")
    assert not is_whole(path)
    remove(path)
    assert not list(tmp_path.iterdir())
    assert not is_whole(path)


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    """Damaged twice, both are kept."""
    for content in ("first", "second"):
        (tmp_path / "a").write_text(content)
        set_aside(tmp_path / "a")
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["second", "first"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-2-a", "damaged-a"]


def test_damage_is_a_mistake_to_put_right_not_a_defect(tmp_path: Path) -> None:
    """The command line prints it and leaves with code 2."""
    with pytest.raises(UserError, match="is damaged"):
        read_sealed(tmp_path / "nowhere")
