"""What a game answers is checked in its worker: a move that cannot be is its episode's failure, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.environment import Step
from penstock.environments.loading import load_environment
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call, Reply

GAMES = "tests.environments.games.games"
FIRST = Step(agent="a", observation="go")


def config_of(name: str, agents: list[str] | None) -> EnvironmentConfig:
    return EnvironmentConfig(type=f"{GAMES}:{name}", agents=agents, workers=1)


@pytest.fixture(scope="module", params=["Scripted", "ScriptedAsync"])
def told(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Reply]]]:
    """Plays scripted moves, the last call being the last of the episode where `cut`."""
    pool = EnvironmentPool(config_of(request.param, ["a", "b"]))
    names = iter(range(1000))

    def tell(*moves: object, cut: bool = False) -> list[Reply]:
        name, replies = str(next(names)), list[Reply]()
        for number in range(len(moves)):
            call = Call(name, text="x", last=cut and number == len(moves) - 1)
            pool.ask([Call(name, row={"moves": list(moves)}) if not number else call])
            replies.append(pool.replies(wait_for=1)[name])
        return replies

    yield tell
    pool.close()


def test_moves_and_pay_arrive_by_agent(told: Callable[..., list[Reply]]) -> None:
    """A number, named parts, and nothing."""
    shown = Step(agent="b", observation="now you", rewards={"a": 2, "b": {"fast": 1.0, "right": 0.5}})
    first, second, last = told(FIRST, shown, Step(done=True, rewards={"b": 1.0, "a": None}))
    assert (first.agent, first.observation, first.rewards) == ("a", "go", {})
    assert (second.agent, second.rewards) == ("b", {"a": (2.0, {}), "b": (1.5, {"fast": 1.0, "right": 0.5})})
    assert last.done and last.rewards == {"b": (1.0, {})} and last.failure is None


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        (Step(agent="c", observation="go"), "the turn is given to 'c', and environment.agents has a, b"),
        (Step(observation="go"), "the turn is given to None"),
        (Step(agent="b"), "'b' has the turn and is shown nothing"),
        (Step(done=True, reward=1.0), "pays its agents by name"),
        (Step(done=True, rewards={"c": 1.0}), "a reward for 'c'"),
        (Step(done=True, rewards={"a": float("nan")}), "reward"),
        ("b", "returned a str, not a Step"),
        (Step(agent="b", observation=3), "not text"),  # type: ignore[arg-type]
    ],
)
def test_a_move_that_cannot_be_fails_the_game(told: Callable[..., list[Reply]], move: object, reason: str) -> None:
    """At its beginning and later. Control: the test above."""
    for moves in ((move,), (FIRST, move)):
        assert reason in str(told(*moves)[-1].failure)


def test_after_the_last_turn_nobody_needs_to_have_the_next(told: Callable[..., list[Reply]]) -> None:
    """Control: before it somebody does."""
    assert told(FIRST, Step(rewards={"a": 1.0}), cut=True)[-1].failure is None
    assert told(FIRST, Step(rewards={"a": 1.0}))[-1].failure is not None


@pytest.mark.parametrize(
    ("name", "agents", "message"),
    [
        (
            "Scripted",
            None,
            r"game of the agents a, b, and environment.agents has none.*\n.*environment.agents=\[a, b\]",
        ),
        ("Others", ["a", "b"], "game of the agents b, a, and environment.agents has a, b"),
        ("Nameless", ["a", "b"], "'agents' of 2, and a game has at least two"),
        ("Lonely", None, r"'agents' of \('a',\), and a game has at least two"),
        ("Alone", ["a", "b"], "'environment.agents' has no effect"),
        ("OverHttp", ["a", "b"], "played over HTTP or by tools"),
        ("WithTools", ["b", "a"], "played over HTTP or by tools"),
    ],
)
def test_the_recipe_names_the_agents_of_the_class(name: str, agents: list[str] | None, message: str) -> None:
    """In its order. Control: one that does loads."""
    with pytest.raises(UserError, match=message):
        load_environment(config_of(name, agents))
    load_environment(config_of("Scripted", ["a", "b"]))


@pytest.mark.parametrize("name", ["OverHttp", "WithTools"])
def test_what_cannot_be_a_game_may_call_anything_agents(name: str) -> None:
    """Control: a game may not, above."""
    load_environment(config_of(name, None))


def test_one_who_plays_alone_has_no_agents_to_pay() -> None:
    """The rewards of a game are not taken from an environment that is none. Control: it played until then."""
    pool = EnvironmentPool(config_of("Alone", None))
    replies = list[Any]()
    for call in (Call("e", row={}), Call("e", text="x")):
        pool.ask([call])
        replies.append(pool.replies(wait_for=1)["e"])
    pool.close()
    assert replies[0].failure is None
    assert "environment.agents" in str(replies[1].failure)
