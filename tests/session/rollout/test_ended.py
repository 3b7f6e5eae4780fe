"""Ended responses of a rollout that is cut off: what is whole in its file is taken over, and nothing of another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import EndedResponses
from penstock.session.rollout.ended import EndedFile, origin_of_ended, other_streams
from tests.echo import GREEDY, ended_responses

FIRST = ended_responses([4, 0], [1, 0], Ragged.of([[7, 8], [9]], np.int32), version=3)
SECOND = ended_responses([4, 2], [0, 1], Ragged.of([[5], [6, 6, 6]], np.int32), version=4)


def _written(path: Path, *told: EndedResponses, origin: str = "it", whole: bool = True) -> EndedFile:
    file = EndedFile(path, origin)
    for ended in told:
        file.add(ended)
    if whole:
        file.close()
    return file


def _rows(ended: EndedResponses | None) -> dict[tuple[int, int], list[object]]:
    assert ended is not None
    entries = zip(ended.positions.tolist(), ended.samples.tolist(), strict=True)
    of = ended.responses
    assert of.ended_B.all()

    def row(values_T: np.ndarray, number: int) -> list[object]:
        rows = Ragged(values_T, of.tokens.offsets_B1) if len(values_T) else Ragged.of([[]] * len(of.tokens), np.float32)
        return list(rows.row(number).tolist())

    columns = (of.tokens.values_T, of.logprobs_T, of.versions_T)
    return {
        entry: [*(row(column, number) for column in columns), bool(of.truncated_B[number])]
        for number, entry in enumerate(entries)
    }


def test_what_was_told_is_there_after_a_kill(tmp_path: Path) -> None:
    """Without an end of the file, which a process that is killed does not write."""
    path = tmp_path / "experience" / "000003.ended.arrows"
    file = _written(path, FIRST, SECOND, whole=False)
    assert _rows(EndedFile(path, "it").read(4)) == _rows(FIRST) | _rows(SECOND)
    file.close()
    assert _rows(EndedFile(path, "it").read(4)) == _rows(FIRST) | _rows(SECOND)


def test_log_probs_that_nobody_asked_for_are_none(tmp_path: Path) -> None:
    bare = dataclasses.replace(
        FIRST, responses=dataclasses.replace(FIRST.responses, logprobs_T=np.empty(0, np.float32))
    )
    _written(tmp_path / "ended", bare)
    found = EndedFile(tmp_path / "ended", "it").read(4)
    assert found is not None
    assert found.responses.logprobs_T.dtype == np.float32
    assert _rows(found) == _rows(bare)


def test_another_attempt_keeps_what_it_takes_over(tmp_path: Path) -> None:
    """Also when it hears of it again, and is cut off as well."""
    _written(tmp_path / "ended", FIRST)
    file = EndedFile(tmp_path / "ended", "it")
    assert _rows(file.read(4)) == _rows(FIRST)
    file.add(FIRST)
    file.add(SECOND)
    again = EndedFile(tmp_path / "ended", "it").read(4)
    assert again is not None
    assert len(again.positions) == 4
    assert _rows(again) == _rows(FIRST) | _rows(SECOND)
    file.close()


@pytest.mark.parametrize("cut", [1, 40])
def test_what_a_crash_leaves_half_written_is_left_out(tmp_path: Path, cut: int) -> None:
    """The batches before it are of use."""
    file = _written(tmp_path / "ended", FIRST, SECOND, whole=False)
    data = (tmp_path / "ended").read_bytes()
    (tmp_path / "ended").write_bytes(data[:-cut])
    assert _rows(EndedFile(tmp_path / "ended", "it").read(4)) == _rows(FIRST)
    file.close()


def test_a_hole_is_left_out(tmp_path: Path) -> None:
    """After a restart of the machine, where pages of a file may never have reached the disk."""
    _written(tmp_path / "ended", FIRST, SECOND)
    data = (tmp_path / "ended").read_bytes()
    tokens = np.asarray([6, 6, 6], np.int32).tobytes()
    assert data.count(tokens) == 1
    (tmp_path / "ended").write_bytes(data.replace(tokens, bytes(len(tokens))))
    assert _rows(EndedFile(tmp_path / "ended", "it").read(4)) == _rows(FIRST)


def test_nothing_is_taken_over_from_another_rollout_or_from_none(tmp_path: Path) -> None:
    _written(tmp_path / "ended", FIRST)
    assert EndedFile(tmp_path / "ended", "other").read(4) is None
    assert EndedFile(tmp_path / "none", "it").read(4) is None
    (tmp_path / "empty").touch()
    assert EndedFile(tmp_path / "empty", "it").read(4) is None


def test_the_origin_tells_policies_prompts_and_settings_apart() -> None:
    """And what the rollout goes on with. Control: the same again is the same."""
    prompts = pd.DataFrame({"prompt_id": ["a", "b"]})
    carried = FIRST.responses
    asked = [
        ({"samples": 2}, 3, prompts, None),
        ({"samples": 2}, 3, prompts, None),
        ({"samples": 4}, 3, prompts, None),
        ({"samples": 2}, 4, prompts, None),
        ({"samples": 2}, 3, prompts.iloc[::-1], None),
        ({"samples": 2}, 3, prompts, carried),
        ({"samples": 2}, 3, prompts, SECOND.responses),
    ]
    origins = [origin_of_ended(*arguments) for arguments in asked]
    assert origins[0] == origins[1]
    assert len(set(origins)) == len(origins) - 1


def test_the_rest_comes_from_streams_that_nothing_came_from() -> None:
    """Of no purpose that a rollout has otherwise, and others the more there is."""
    seeds = {tuple(other_streams(GREEDY, count).seed) for count in range(1, 100)}
    assert len(seeds) == 99
    assert min(purpose for *_, purpose in seeds) > 1000
    assert {seed[:2] for seed in seeds} == {tuple(GREEDY.seed[:2])}


def test_responses_of_a_policy_that_is_lost_are_left(tmp_path: Path) -> None:
    """A response with one token of a later policy than the engines', at its beginning or its end; the others stay."""
    tokens = Ragged.of([[5], [6, 6, 6], [7, 7]], np.int32)
    told = ended_responses([4, 2, 1], [0, 1, 1], tokens, version=3)
    mixed = np.array([3, 3, 3, 4, 4, 3], np.int32)
    told = dataclasses.replace(told, responses=dataclasses.replace(told.responses, versions_T=mixed))
    _written(tmp_path / "ended", FIRST, told)
    assert len(_rows(EndedFile(tmp_path / "ended", "it").read(4))) == 5
    found = _rows(EndedFile(tmp_path / "ended", "it").read(3))
    assert found == _rows(FIRST) | {(4, 0): _rows(told)[(4, 0)]}
    assert EndedFile(tmp_path / "ended", "it").read(2) is None
