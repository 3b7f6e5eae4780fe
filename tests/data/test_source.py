"""A start reads each data file once: what was checked is what is trained on, and nothing of it is kept afterwards."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.checks.preferences import check_preferences
from penstock.checks.prompts import describe_prompts, first_row
from penstock.checks.tokenized import check_tokenized
from penstock.checks.training import check_inputs, check_supervised
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.data import source
from penstock.data.source import digest_of, forget, reading_once, rows_of, split_of
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.session.session import Training
from penstock.state.experience import read_columns
from penstock.tasks.finetuning.preferences import load_preferences, preferences_file
from penstock.tasks.start import load_pairs, load_prompts
from tests.training import training_with as training_with

MakeTraining = Callable[[TrainConfig], Training]
NAMES = ("train", "heldout", "sft")
_opened: list[str] = []
_listening: list[Path] = []  # below which folder


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _listening or not str(arguments[1]).startswith("r"):
        return
    if str(arguments[0]).startswith(str(_listening[0])):
        _opened.append(Path(str(arguments[0])).name)


sys.addaudithook(_hear)  # Python has no way to take one away


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[str]]:
    """The names of data files in the order in which they are opened to be read, by whatever function."""
    _opened.clear()
    _listening.append(tmp_path / "files")
    yield _opened
    _listening.clear()


@pytest.fixture(params=["jsonl", "parquet"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    """A training with agents, a sampler that reads a column, and a warm-up: every check that looks at rows."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name in NAMES:
        write(folder / f"{name}.{request.param}", 4, name)
    data = {name: str(folder / f"{name}.{request.param}") for name in NAMES}
    return TrainConfig.model_validate(
        {
            "model": {"tiny": {}},
            "data": {
                **data,
                "response": "answer",
                "agents": {"names": ["first", "second"], "column": "agent"},
                "sampler": {"name": "curriculum", "column": "level"},
            },
            "rollout": {"prompts": 2},
            "reward": {"function": "penstock.rewards.builtin:exact_match"},
            "algorithm": {"name": "ippo"},
            "critic": {},
            "sft": {},
        }
    )


def write(path: Path, count: int, answer: str, agents: tuple[str, ...] = ("first", "second")) -> None:
    rows = [
        {"prompt": f"{n}+1=", "answer": answer, "agent": agents[n % 2], "level": n, "chosen": answer, "rejected": "x"}
        for n in range(count)
    ]
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_checks_read_every_file_once(config: TrainConfig, opened: list[str]) -> None:
    """However many look at its rows. Controls: what is wrong in them is found, and each call alone reads anew."""
    check_inputs(config)
    assert sorted(name.split(".")[0] for name in opened) == ["heldout", "sft", "train"]
    opened.clear()
    train = Path(str(config.data.train))
    for _ in range(2):
        rows_of(train)
        digest_of(train)
    assert opened == [train.name] * 4
    write(train, 4, "train", ("first", "third"))
    with pytest.raises(UserError, match="'agent' has the value 'third'"):
        check_inputs(config)


def test_what_was_checked_is_what_a_training_starts_with(
    config: TrainConfig, opened: list[str], training_with: MakeTraining, tmp_path: Path
) -> None:
    """All files are replaced after the checks. Control: the next start has the new ones."""
    training, model = training_with(config), str(tmp_path / "model")
    make_byte_tokenizer(tmp_path / "model")
    with reading_once(), disable_run_logger():
        check_inputs(config)
        for name in NAMES:
            write(Path(str(getattr(config.data, name))), 3, "other")
        opened.clear()
        assert describe_prompts(config)[0].startswith("train: 4 prompts")
        assert first_row(config)[1]["answer"] == "train"
        assert load_prompts.fn(training, model)["train"] == 4
        assert load_pairs.fn(training, model) == 4
        assert opened == []
    assert set(training.session().prompts["heldout"].frame["answer"]) == {"heldout"}
    with pytest.raises(UserError, match=r"content of data\.train is not what the rows"):
        check_tokenized(training.run, config)  # the note is of what was tokenized
    with reading_once():
        assert describe_prompts(config)[0].startswith("train: 3 prompts")
        assert opened.count(Path(str(config.data.train)).name) == 2  # by the check of the note, and now


@pytest.mark.parametrize("resumed", [False, True])
def test_no_row_of_supervised_training_is_kept_while_it_runs(
    config: TrainConfig, training_with: MakeTraining, tmp_path: Path, resumed: bool
) -> None:
    """Also in a resume, which tokenizes nothing: its checks have read the file. Control: until then they are there."""
    training, model = training_with(config), str(tmp_path / "model")
    make_byte_tokenizer(tmp_path / "model")
    with disable_run_logger():
        if resumed:
            load_pairs.fn(training, model)
        with reading_once():
            check_supervised(config)
            assert source._kept
            assert load_pairs.fn(training, model) == 4
            assert not source._kept


def test_preferences_likewise(
    config: TrainConfig, opened: list[str], training_with: MakeTraining, tmp_path: Path
) -> None:
    """Both splits may be of one file."""
    make_byte_tokenizer(tmp_path / "model")
    pairs = str(config.data.train)
    preferring = PreferenceConfig.model_validate({"model": {"tiny": {}}, "data": {"train": pairs, "heldout": pairs}})
    training = training_with(TrainConfig())
    with reading_once(), disable_run_logger():
        check_preferences(preferring)
        write(Path(pairs), 3, "other")
        assert load_preferences.fn(training, preferring, str(tmp_path / "model")) == {"train": 4, "heldout": 4}
        assert opened == [Path(pairs).name]
        rows_of(Path(pairs))
        assert len(opened) == 2  # the control: all is tokenized, so nothing was kept
    assert len(read_columns(preferences_file(training, "train"), ["response_tokens"])["response_tokens"]) == 8


def test_the_digest_is_of_the_bytes_that_were_read(config: TrainConfig) -> None:
    """Also once the file is another one. Control: outside of a start it is the other's."""
    path = Path(str(config.data.train))
    before = path.read_bytes()
    with reading_once():
        rows_of(path)
        write(path, 3, "other")
        assert digest_of(path) == hashlib.sha256(before).hexdigest()
        assert len(rows_of(path)) == 4
    assert digest_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("how", ["forgotten", "ended", "failed"])
def test_no_memory_is_kept_after_a_start(config: TrainConfig, how: str) -> None:
    """Controls: during it the rows live without anybody else, also when a scope inside it has ended."""
    kept = None
    try:
        with reading_once():
            with reading_once():
                kept = weakref.ref(split_of(config, "train"))
            gc.collect()
            assert kept() is not None
            if how == "forgotten":
                forget()
                gc.collect()
                assert kept() is None
            if how == "failed":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    gc.collect()
    assert kept is not None
    assert kept() is None
    assert source._kept == {}


def test_made_up_problems_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a seed. Controls: those of another, and outside of a start."""
    made: list[int] = []
    make = source.make_problems
    monkeypatch.setattr(source, "make_problems", lambda config, seed: made.append(seed) or make(config, seed))
    section = {"arithmetic": {"digits": 1, "sft": 8, "train": 8, "heldout": 8}}
    first, other = (TrainConfig.model_validate({"seed": seed, "data": section}) for seed in (1, 2))
    with reading_once():
        for config in (first, first, other):
            split_of(config, "train"), split_of(config, "heldout")
    assert made == [1, 2]
    split_of(first, "train")
    assert made == [1, 2, 1]
