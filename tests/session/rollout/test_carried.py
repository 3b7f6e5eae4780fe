"""What a rollout leaves unfinished is there for the next, or known to be gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import Asked, CarriedEpisodes, CarriedResponses
from penstock.session.rollout.carried import (
    begun_before,
    digest_of,
    is_kept,
    keep_carried,
    left_over,
    not_begun,
    staleness_figures,
)
from penstock.session.session import Training
from penstock.state.deferred import Deferred
from tests.echo import NOTHING

LEFT = CarriedResponses(
    tokens=Ragged.of([[4, 5, 6], [], [8], [9, 9]], np.int32),
    logprobs_T=np.asarray([-0.5, -1, -2, -0.25, -3, -4], np.float32),
    versions_T=np.asarray([1, 1, 2, 2, 1, 2], np.int32),
    ended_B=np.asarray([False, False, True, False]),
    truncated_B=np.asarray([False, False, True, False]),
)
EPISODES = CarriedEpisodes(
    seeds_B=np.asarray([1 << 62, -1, 5, 6], np.int64),
    loss_mask_T=np.asarray([1, 0, 1, 1, 1, 0], np.uint8),
    turn_ends=Ragged.of([[1], [], [1], [1]], np.int32),
    owed_B=np.asarray([False, False, False, True]),
    rewards_B=np.asarray([0.25, np.nan, 1.0, 0.0]),
    parts_B=[{"right": 0.1}, {}, {}, {"right": 1e-9, "polite": 2.0}],
    failures_B=[None, None, "timed out", None],
)
HOMES = np.asarray([1, 1, -1, 0], np.int32)
WAITING = (Deferred(7, 1), Deferred(3, 2))


@pytest.fixture
def training(training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch) -> Training:
    """One whose responses are carried over, two to a prompt."""
    monkeypatch.setattr("penstock.session.rollout.carried.get_run_logger", lambda: logging.getLogger("carried"))
    made = training_with(config_from_mapping({"rollout": {"samples": 2, "carry": {}}}, "test"))
    made.run.carried(1).parent.mkdir(parents=True)
    return made


def columns(carried: CarriedResponses | None) -> list[object]:
    """Return all of it as plain lists."""
    assert carried is not None
    rows = [carried.tokens.row(row).tolist() for row in range(len(carried.tokens))]
    values = (carried.logprobs_T, carried.versions_T, carried.ended_B, carried.truncated_B)
    return [rows, *(column.tolist() for column in values), *played(carried.episodes)]


def played(episodes: CarriedEpisodes | None) -> list[object]:
    """Return what episodes add, as plain lists."""
    if episodes is None:
        return []
    ends = [episodes.turn_ends.row(row).tolist() for row in range(len(episodes.turn_ends))]
    values = (episodes.seeds_B, episodes.loss_mask_T, episodes.owed_B, np.nan_to_num(episodes.rewards_B, nan=-9.0))
    return [ends, *(column.tolist() for column in values), episodes.parts_B, episodes.failures_B]


def test_what_was_kept_is_there_for_those_that_wait(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Controls: of other prompts, or of another iteration, nothing is known, which is said; of no prompt it is not."""
    digest = keep_carried(training.run, 3, LEFT, WAITING)
    found = begun_before(training, 3, WAITING)
    assert columns(found) == columns(LEFT)
    assert found is not None and all(
        getattr(found, name).dtype == getattr(LEFT, name).dtype for name in ("logprobs_T", "versions_T", "ended_B")
    )
    assert found.engines_B is None
    keep_carried(training.run, 5, replace(LEFT, engines_B=HOMES), WAITING)
    placed = begun_before(training, 5, WAITING)
    assert columns(placed) == columns(LEFT) and placed.engines_B is not None
    assert placed.engines_B.dtype == np.int32 and placed.engines_B.tolist() == HOMES.tolist()
    assert columns(begun_before(training, 9, ())) == columns(not_begun(0, environment=False))
    assert not caplog.text
    for iteration, waiting in ((3, WAITING[::-1]), (3, WAITING[:1]), (4, WAITING)):
        assert columns(begun_before(training, iteration, waiting)) == columns(
            not_begun(2 * len(waiting), environment=False)
        )
        assert f"{training.run.carried(iteration)} does not hold" in caplog.text
        caplog.clear()
    assert is_kept(training.run, 3, digest) and not is_kept(training.run, 4, digest)


def test_log_probs_that_nobody_asked_for_are_not_kept(training: Training) -> None:
    """All else is. Control: they are part of the digest."""
    left = replace(LEFT, logprobs_T=np.empty(0, np.float32))
    digest = keep_carried(training.run, 3, left, WAITING)
    found = begun_before(training, 3, WAITING)
    assert columns(found) == columns(left) and is_kept(training.run, 3, digest) and digest != digest_of(LEFT)
    second = replace(NOTHING, left_P=np.asarray([1]), left=left)
    after = left_over(not_begun(2, environment=False), [second], [0, 1, 2], samples=2)
    assert not len(after.logprobs_T) and after.tokens.lengths_B.tolist() == [0, 0, 3, 0, 0, 0]


def test_what_was_kept_of_episodes_is_there(training: Training) -> None:
    """As it was, in the same types; nothing of those that have not begun. Control: of responses there are none."""
    left = replace(LEFT, episodes=EPISODES)
    digest = keep_carried(training.run, 3, left, WAITING)
    found = begun_before(training, 3, WAITING)
    assert found is not None and columns(found) == columns(left) and is_kept(training.run, 3, digest)
    assert digest_of(found) == digest != digest_of(LEFT)
    for name in ("seeds_B", "loss_mask_T", "owed_B", "rewards_B"):
        assert getattr(found.episodes, name).dtype == getattr(EPISODES, name).dtype
    others = [
        replace(EPISODES, turn_ends=Ragged.of([[1], [], [], [1, 1]], np.int32)),
        replace(EPISODES, parts_B=EPISODES.parts_B[::-1]),
        replace(EPISODES, failures_B=EPISODES.failures_B[::-1]),
        *(
            replace(EPISODES, **{name: getattr(EPISODES, name)[::-1].copy()})
            for name in ("seeds_B", "loss_mask_T", "owed_B", "rewards_B")
        ),
    ]
    assert len({digest_of(replace(LEFT, episodes=one)) for one in [EPISODES, *others]}) == 1 + len(others)

    empty, second = not_begun(2, environment=True), replace(NOTHING, left_P=np.asarray([1]), left=left)
    after = left_over(empty, [second], [0, 1, 2], samples=2)
    assert after.episodes is not None
    assert after.episodes.seeds_B.tolist() == [-1, -1, *EPISODES.seeds_B[:2].tolist(), -1, -1]
    assert after.episodes.parts_B == [{}, {}, {"right": 0.1}, {}, {}, {}]
    assert columns(left_over(left, [NOTHING], [0, 1], samples=2)) == columns(left)
    keep_carried(training.run, 4, LEFT, WAITING)
    without = begun_before(training, 4, WAITING)
    assert without is not None and without.episodes is None


def asked(episodes: CarriedEpisodes | None) -> list[object]:
    """Return what agents bring, as plain lists."""
    assert episodes is not None and episodes.asked is not None
    prompts = episodes.asked.prompts
    rows = [prompts.row(row).tolist() for row in range(len(prompts))]
    return [rows, list(episodes.asked.texts_B), episodes.asked.unbridged_B.tolist(), episodes.known_B]


def test_what_agents_bring_is_kept(training: Training) -> None:
    """Prompts, their texts, what is not learnt from, and what the engine knew. Of those that have not begun nothing is
    there. Control: each is part of the digest.
    """
    brought = Asked(Ragged.of([[1], [], [2, 3], [4]], np.int32), ["a", "", "bc", "d"], np.asarray([1, 0, 0, 2]))
    episodes = replace(EPISODES, asked=brought, known_B=["ab", "", "", "cd"])
    left = replace(LEFT, episodes=episodes)
    digest = keep_carried(training.run, 3, left, WAITING)
    found = begun_before(training, 3, WAITING)
    assert columns(found) == columns(left) and asked(found.episodes) == asked(episodes)
    assert digest_of(found) == digest and is_kept(training.run, 3, digest)
    others = [
        replace(episodes, known_B=["ab", "", "", "ef"]),
        replace(episodes, asked=replace(brought, unbridged_B=np.asarray([1, 0, 0, 3]))),
        replace(episodes, asked=replace(brought, prompts=Ragged.of([[1], [], [2, 3], [5]], np.int32))),
    ]
    assert len({digest_of(replace(LEFT, episodes=one)) for one in [episodes, EPISODES, *others]}) == 2 + len(others)
    second = replace(NOTHING, left_P=np.asarray([1]), left=left)
    after = left_over(not_begun(2, environment=True), [second], [0, 1], samples=2)
    none = [[[], [], [1], []], ["", "", "a", ""], [0, 0, 1, 0], ["", "", "ab", ""]]
    assert asked(after.episodes) == none


def test_a_digest_is_that_of_all_there_is() -> None:
    """Whatever differs makes another one. Control: a copy has the same."""
    other = [
        replace(LEFT, tokens=Ragged.of([[4, 5], [6], [8], [9, 9]], np.int32)),
        replace(LEFT, tokens=Ragged.of([[4, 5, 7], [], [8], [9, 9]], np.int32)),
        *(replace(LEFT, **{name: getattr(LEFT, name)[::-1].copy()}) for name in ("logprobs_T", "versions_T")),
        *(replace(LEFT, **{name: ~getattr(LEFT, name)}) for name in ("ended_B", "truncated_B")),
    ]
    assert len({digest_of(one) for one in [LEFT, *other]}) == 1 + len(other)
    assert digest_of(replace(LEFT, logprobs_T=LEFT.logprobs_T.copy())) == digest_of(LEFT)


def test_engines_tell_what_there_is_now_and_the_rest_is_as_it_was() -> None:
    """Of five prompts two were carried. One engine goes on with the second, another has begun the fourth.

    The first was got to by no engine, the third neither: it has not begun. The fifth was answered.
    """
    second = replace(LEFT, tokens=Ragged.of([[8, 8], [9, 9, 9]], np.int32), **_of_tokens(5), **_of_rows(2))
    fourth = replace(LEFT, tokens=Ragged.of([[1], [2, 2]], np.int32), **_of_tokens(3, 20), **_of_rows(2))
    answers = [
        replace(NOTHING, left_P=np.asarray([1]), left=second),
        replace(NOTHING, left_P=np.asarray([3]), left=fourth),
    ]
    found = left_over(LEFT, answers, [0, 1, 2, 3], samples=2)
    rows, logprobs, versions, ended, _ = columns(found)
    assert rows == [[4, 5, 6], [], [8, 8], [9, 9, 9], [], [], [1], [2, 2]]
    assert logprobs == [-0.5, -1, -2, *range(5), 20, 21, 22]
    assert versions == [1, 1, 2, *[7] * 8]
    assert ended == [False, False, True, True, False, False, True, True]
    nothing = not_begun(0, environment=False)
    assert columns(left_over(nothing, [NOTHING], [], samples=2)) == columns(nothing)


def _of_tokens(count: int, first: int = 0) -> dict[str, np.ndarray]:
    return {"logprobs_T": np.arange(first, first + count, dtype=np.float32), "versions_T": np.full(count, 7, np.int32)}


def _of_rows(count: int) -> dict[str, np.ndarray]:
    return {"ended_B": np.ones(count, bool), "truncated_B": np.zeros(count, bool)}


def test_staleness_is_of_the_policys_tokens() -> None:
    """In updates. Controls: of a synchronous rollout nothing is said; an observation's tokens do not count."""
    versions = Ragged.of([[3, 3, 5], [5], [4, 5]], np.int32)
    every = Ragged(np.ones(6, np.uint8), versions.offsets_B1)
    figures = staleness_figures(5, versions, every)
    assert figures == {
        "rollout/staleness_mean": pytest.approx(5 / 6),
        "rollout/staleness_max": 2.0,
        "rollout/off_policy_share": 0.5,
    }
    assert staleness_figures(5, None, every) == {}
    own = Ragged(np.asarray([0, 0, 1, 1, 1, 1], np.uint8), versions.offsets_B1)
    assert staleness_figures(5, versions, own)["rollout/staleness_max"] == 1.0
