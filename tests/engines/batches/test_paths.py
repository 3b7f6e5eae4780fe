"""A sample of several conversations is one row of the experience; in a run each of them is a sequence of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import Rows, pack, read_rows
from penstock.state.experience import write_columns
from tests.engines.batches.path_rows import PathRows, rows_of_paths

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made() -> PathRows:
    return rows_of_paths()


def test_a_file_gives_every_path_with_its_own_prompt(made: PathRows, tmp_path: Path) -> None:
    """Tokens, masks and columns as if each had been a row. Control: a sample's response is no path's."""
    write_columns(tmp_path / "experience.parquet", made.columns)
    rows = read_rows(str(tmp_path / "experience.parquet"), ["advantages"])
    sequences = rows.sequences
    assert len(rows) == 4 and len(sequences) == len(made.sample_P) == 9
    for row in range(len(sequences)):
        for found, expected in (
            (sequences.prompts, made.alone.prompts),
            (sequences.responses, made.alone.responses),
            (sequences.mask, made.alone.mask),
        ):
            assert found.row(row).tolist() == expected.row(row).tolist()
    assert rows.responses.row(1).tolist() != made.alone.responses.row(1).tolist()
    own = np.bincount(made.sample_P, made.alone.lengths_B)
    assert rows.lengths_B.tolist() == own.tolist()


def test_samples_of_one_path_each_are_rows_as_ever(made: PathRows, tmp_path: Path) -> None:
    """So a training in which nothing branches is packed as one that learns from one path, to the last bit."""
    single = {name: column.take(np.array([0, 0])) for name, column in made.columns.items()}
    write_columns(tmp_path / "experience.parquet", single)
    assert read_rows(str(tmp_path / "experience.parquet")).paths is None


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [2], [3, 1], [1, 2, 0]])
def test_a_run_has_the_sequences_of_its_samples(made: PathRows, index: list[int]) -> None:
    """The same tokens at the same places as a run of those paths, and what a loss reads sample by sample.

    Control: a run of the paths as rows of their own ends a response at each of them.
    """
    of_index = [path for sample in index for path, owner in enumerate(made.sample_P) if owner == sample]
    found, expected = pack(made.samples, index, CPU), pack(made.alone, of_index, CPU)
    for name in ("tokens_N", "positions_N", "predict_T", "targets_T", "mask_T", "last_B"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    assert found.columns["advantages"].tolist() == expected.columns["advantages"].tolist()
    assert found.layout.cu_keys_S1.tolist() == expected.layout.cu_keys_S1.tolist()
    assert found.branched == expected.branched
    assert (found.branched > 0) == (2 in index), "what a path has in common with another is computed once"
    lengths = [int(made.samples.responses.lengths_B[sample]) for sample in index]
    assert found.offsets_B1.diff().tolist() == lengths
    assert expected.offsets_B1.diff().tolist() != lengths


def test_some_of_the_rows_are_those_with_their_paths(made: PathRows) -> None:
    """As a critic's own rows, or the one that stands for an empty micro-batch. Control: other rows have others."""
    taken = made.samples.take(np.array([3, 1]))
    assert pack(taken, [0, 1], CPU).tokens_N.tolist() == pack(made.samples, [3, 1], CPU).tokens_N.tolist()
    assert pack(taken, [0], CPU).tokens_N.tolist() != pack(made.samples, [1], CPU).tokens_N.tolist()
    empty = pack(made.samples, [], CPU)
    assert not empty.mask_T.any() and empty.computed == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_a_plan_never_cuts_a_sample_apart(made: PathRows, ranks: int, budget: int) -> None:
    """Every sample once, those of a prompt beside each other; further paths count as tokens of their sample.

    Control: with the paths as rows the smallest budget has a micro-batch for each.
    """
    plan = plan_micro_batches(made.samples, ranks, budget)
    assert [sample for rank in plan for micro in rank for sample in micro] == [0, 1, 2, 3]
    for micro in [micro for rank in plan for micro in rank if len(micro) > 1]:
        assert len(pack(made.samples, micro, CPU).tokens_N) <= budget
    if budget == 40:
        assert not any({2} < set(micro) for rank in plan for micro in rank), "it fills the budget by itself"
    apart = plan_micro_batches(made.alone, 1, 1)[0]
    assert len(apart) == 9


def test_rows_without_paths_are_not_touched(made: PathRows) -> None:
    """The same object is packed. Control: with paths it is another."""
    plain: Rows = replace(made.samples, paths=None)
    assert plain.sequences is plain and made.samples.sequences is not made.samples
    assert isinstance(made.samples.sequences.prompts, Ragged)
