"""What does not go together with an environment is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.data import check_prompt_selection
from penstock.checks.training import check_environment, check_inputs, check_reward
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig

GAME = {"type": "penstock.environments.calculator:Calculator"}
TWO = {"type": "my_games:Game", "agents": ["a", "b"]}
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"environment": GAME, "rollout": {"tensor_parallel": 2}}, "needs 'rollout.tensor_parallel' 1"),
        ({"environment": GAME, "rollout": {"ignore_eos": True}}, "'rollout.ignore_eos' leaves no end"),
        ({"environment": GAME, "data": {"too_long": "left"}}, "'data.too_long' left does not go with"),
        ({"data": {"arithmetic": {"calls": 0.5}}}, "'data.arithmetic.calls' needs an 'environment'"),
        (
            {"environment": GAME, "data": {"arithmetic": {"calls": 0.5, "mistakes": 0.1}}},
            "'calls' and 'mistakes' are different teachers",
        ),
        ({"environment": {**GAME, "max_turns": 0}}, "max_turns"),
        ({"environment": {}}, "type"),
    ],
)
def test_refusals(sections: dict[str, Any], message: str) -> None:
    """Control: the sections without the mistake pass, below."""
    with pytest.raises(ValueError, match=message):
        TrainConfig(**sections)


def test_an_environment_may_be_the_only_reward() -> None:
    """Or stand beside a function. Control: without it there has to be one."""
    check_reward(TrainConfig(environment=GAME), [])
    both = TrainConfig(environment=GAME, reward={"function": "penstock.rewards.builtin:exact_match"})
    check_reward(both, ["answer"])
    with pytest.raises(UserError, match="no reward"):
        check_reward(TrainConfig(), [])
    with pytest.raises(UserError, match="asks for 'answer'"):
        check_reward(both, [])


def test_the_environment_is_loaded_before_anything_starts() -> None:
    """With its settings."""
    check_environment(TrainConfig(environment={**GAME, "settings": {"penalty": 0.1}}))
    with pytest.raises(UserError, match="unexpected keyword argument 'bonus'"):
        check_environment(TrainConfig(environment={**GAME, "settings": {"bonus": 0.1}}))


def test_agents_do_not_go_with_what_nobody_has_compared() -> None:
    """Further rounds that go on with them, and several paths where one waits for no others. Controls: without the one
    or the other they do; an environment goes with further rounds.
    """
    agent = {"type": "penstock.environments.calculator:CalculatorAgent"}
    apart = {"groups": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}}}
    portions, ahead = [({"prompts": 8, "stream": {"staleness": staleness}}, apart) for staleness in (0, 1)]
    refusing = {"algorithm": {"name": "grpo", "dynamic_sampling": {}}}
    for rollout, sections in (({"tail": {}}, {}), ({"carry": {}}, {}), ahead):
        check_environment(TrainConfig(environment=agent, rollout=rollout, **sections))
        check_environment(TrainConfig(environment=GAME, rollout=rollout, **sections, **refusing))
        with pytest.raises(UserError, match="CalculatorAgent' asks the policy for its turns, and it is not known"):
            check_environment(TrainConfig(environment=agent, rollout=rollout, **sections, **refusing))
    for rollout, sections in (({"carry": {}}, {}), ahead):
        check_environment(TrainConfig(environment=agent, rollout=rollout, **sections))
        with pytest.raises(UserError, match="'environment.max_paths' is above 1"):
            check_environment(TrainConfig(environment={**agent, "max_paths": 2}, rollout=rollout, **sections))
    for rollout, sections in (({"tail": {}}, {}), portions):
        check_environment(TrainConfig(environment={**agent, "max_paths": 2}, rollout=rollout, **sections))
    check_environment(TrainConfig(environment=agent, **refusing))


@pytest.mark.parametrize("name", ["calculator", "checked_sums"])
def test_the_recipes_pass_every_check(name: str) -> None:
    """As `--dry-run` looks at them."""
    check_inputs(load_config(ROOT / "configs" / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"rollout": {"tail": {}}}, "rollout.tail"),
        ({"rollout": {"carry": {}}}, "rollout.carry"),
        ({"algorithm": {"name": "grpo", "dynamic_sampling": {}}}, "algorithm.dynamic_sampling"),
        ({"algorithm": {"name": "remax"}}, "algorithm 'remax'"),
        ({"reward": {"function": "penstock.rewards.builtin:exact_match"}}, "reward.function"),
        (
            {"rollout": {"tail": {}}, "algorithm": {"name": "grpo", "dynamic_sampling": {}}},
            "rollout.tail, algorithm.dynamic_sampling",
        ),
        (
            {
                "rollout": {"prompts": 8, "stream": {}},
                "groups": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}},
            },
            "rollout.stream",
        ),
    ],
)
def test_what_takes_a_sample_to_be_one_conversation_does_not_go_with_a_game(
    sections: dict[str, Any], named: str
) -> None:
    """One message names all of it. Control: the same without the agents of a game, and a game without the same."""
    with pytest.raises(ValueError, match=f"'environment.agents' does not go with {named}: remove it"):
        TrainConfig(environment=TWO, **sections)
    TrainConfig(environment=GAME, **sections)
    TrainConfig(environment=TWO)


def test_a_game_of_chats_ends_turns_as_the_template_does() -> None:
    """Not at texts of its class. Control: a game of texts may."""
    game = {"type": "tests.engines.rollout.games.talking:Talking", "agents": ["host", "guest"]}
    with pytest.raises(UserError, match="Talking' ends turns at '=', '7', 'e', and what an agent is shown later can"):
        check_environment(TrainConfig(environment=game, data={"chat": True}))
    check_environment(TrainConfig(environment=game))


def test_a_sampler_that_remembers_rewards_does_not_go_with_a_game() -> None:
    """A prompt earns several of them. Control: one that does not remember."""
    arithmetic = {"arithmetic": {"sft": 8, "train": 8, "heldout": 8}}
    data = {**arithmetic, "sampler": {"name": "adaptive", "half_life": 5}}
    with pytest.raises(UserError, match="'adaptive' draws by what prompts have earned"):
        check_prompt_selection(TrainConfig(environment=TWO, data=data))
    check_prompt_selection(TrainConfig(environment=GAME, data=data))
    check_prompt_selection(TrainConfig(environment=TWO, data=arithmetic))


def test_agents_of_a_game_have_a_critic_each_where_the_algorithm_tells_them_apart() -> None:
    """They are instead of agents by rows. Control: with one critic, or none, they have rows of their own alone."""
    ippo = {"algorithm": {"name": "ippo"}}
    apart = TrainConfig(environment=TWO, **ippo)
    assert (apart.agents, apart.players, apart.conversations) == (["a", "b"], ["a", "b"], 2)
    for name in ("ppo", "grpo"):
        together = TrainConfig(environment=TWO, algorithm={"name": name})
        assert (together.agents, together.players, together.conversations) == ([], ["a", "b"], 2)
    alone = TrainConfig(environment=GAME)
    assert (alone.players, alone.conversations) == ([], 1)
    by_rows = {"agents": {"column": "role", "names": ["a", "b"]}}
    with pytest.raises(ValueError, match=r"'data\.agents' and 'environment\.agents' exclude each other"):
        TrainConfig(environment=TWO, data=by_rows, **ippo)
    with pytest.raises(ValueError, match="'agents' has 'a' twice"):
        TrainConfig(environment={**TWO, "agents": ["a", "a"]})
    with pytest.raises(ValueError, match="at least 2"):
        TrainConfig(environment={**TWO, "agents": ["a"]})


def test_checked_is_a_teacher_of_its_own() -> None:
    """Its mistakes are a setting, and other teachers are refused."""
    with pytest.raises(ValueError, match="'checked' and 'forgotten_carries' are different teachers"):
        TrainConfig(data={"arithmetic": {"checked": True, "forgotten_carries": 0.1}})
    TrainConfig(data={"arithmetic": {"checked": True, "mistakes": 0.1}})
