"""A game as a whole training: agents learn their parts, and each row is its own agent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.data.tokenizer import DEFAULT_CHARACTERS
from penstock.engines.rollout.episodes import turn_seed
from penstock.environments.games.checked_sums import CheckedSums
from penstock.flows.train import train
from penstock.state.experience import AGENT, read_columns
from penstock.state.run_folder import RunFolder, read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
ITERATIONS, SAMPLES = 6, 8
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 1, checked: true, mistakes: 0.4, sft: 60, train: 60, heldout: 40}",
    "sft={steps: 150, batch: 32}",
    f"rollout={{prompts: 16, samples: {SAMPLES}, max_response_tokens: 20, max_sequences: 256}}",
    "actor.optimizer={learning_rate: 1e-3, warmup_steps: 0}",
    "evaluate={every: 0, temperature: 1.0, samples: 2}",
)


@pytest.fixture(scope="module")
def played(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training."""
    folder = tmp_path_factory.mktemp("runs") / "game"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(load_config(ROOT / "configs" / "checked_sums.yaml", list(SMALL)), run_folder=str(folder))
    return RunFolder(folder)


def test_it_learns_to_play(played: RunFolder) -> None:
    """The checker, of sums that it has not seen, beyond both intervals; so few sums are too few for the solver."""
    first, last = (heldout(played, iteration) for iteration in (0, ITERATIONS))
    assert last["heldout/checker/reward/low"] > first["heldout/checker/reward/high"] + 0.1


def test_two_rows_are_one_game_and_each_is_paid_for_its_own_part(played: RunFolder) -> None:
    """The game, told both rows' turns, shows and pays what stands in them. Control: the agents are paid differently."""
    columns = read_columns(
        played.experience(ITERATIONS), ["prompt", "prompt_id", "response_tokens", "loss_mask", "reward", AGENT, "group"]
    )
    assert (np.bincount(columns["group"]) == SAMPLES).all()
    text = turns_of(columns)
    games = np.arange(len(text)).reshape(-1, 2, SAMPLES).transpose(0, 2, 1).reshape(-1, 2).tolist()
    unlike = 0
    for number, (solver, checker) in enumerate(games):
        seed = turn_seed([0, ITERATIONS, 0], *divmod(number, SAMPLES), 0)
        assert (columns[AGENT][solver], columns[AGENT][checker]) == (0, 1)
        row = {"prompt": columns["prompt"][solver], "answer": answer_of(columns["prompt"][solver])}
        game, said = CheckedSums(), {"solver": list(text[solver]), "checker": list(text[checker])}
        step, shown = game.reset(row, seed), dict[str, list[str]](solver=[], checker=[])
        while not step.done and step.agent is not None and said[step.agent]:
            shown[step.agent].append(str(step.observation))
            step = game.step(said[step.agent].pop(0))
        assert said == {"solver": [], "checker": []}
        assert shown["checker"][:1] == [columns["prompt"][checker]]
        if step.done:
            paid = (columns["reward"][solver], columns["reward"][checker])
            assert paid == (step.rewards["solver"], step.rewards["checker"])
            unlike += paid[0] != paid[1]
    assert unlike


def test_each_agent_has_its_critic_and_its_figures(played: RunFolder) -> None:
    """Held out as in training."""
    (metrics,) = [record["metrics"] for record in read_metrics(played) if record["iteration"] == 1]
    for agent in ("solver", "checker"):
        assert metrics[f"critic/{agent}/loss"] > 0
    assert metrics["critic/solver/loss"] != metrics["critic/checker/loss"]
    last = heldout(played, ITERATIONS)
    both = [last[f"heldout/{agent}/reward"] for agent in ("solver", "checker")]
    assert np.mean(both) == pytest.approx(last["heldout/reward"])
    assert not any("best_at" in name for name in last)


def heldout(run: RunFolder, iteration: int) -> dict[str, float]:
    """Return the figures of an evaluation."""
    of_iteration = [record["metrics"] for record in read_metrics(run) if record["iteration"] == iteration]
    (found,) = [figures for figures in of_iteration if "heldout/reward" in figures]
    return dict(found)


def turns_of(columns: dict[str, Any]) -> list[list[str]]:
    """Return the texts of each row's own turns."""
    tokens, masks = columns["response_tokens"], columns["loss_mask"]
    rows = []
    for row in range(len(tokens)):
        turns, before = list[str](), 0
        for token, mine in zip(tokens.row(row).tolist(), masks.row(row).tolist(), strict=True):
            if mine and not before:
                turns.append("")
            if mine and 3 <= token < 3 + len(DEFAULT_CHARACTERS):
                turns[-1] += DEFAULT_CHARACTERS[token - 3]
            before = mine
        rows.append(turns)
    return rows


def answer_of(prompt: str) -> str:
    left, right = prompt.removesuffix("=").split("+")
    return str(int(left) + int(right))
