"""A dataflow of a user's own is a training like any other: the same numbers for the same steps, also across losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.flows.train import train
from penstock.state.experience import column_names, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights
from tests.docs.pages import blocks
from tests.faults.blows import Blow, blows_falling
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("prefect_harness")]

SMALL = {
    "iterations": 3,
    "model": {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}},
    "data": {"max_prompt_tokens": 16, "arithmetic": {"digits": 2, "train": 40, "heldout": 16}},
    "reward": {"function": "orders:low"},
    "rollout": {"prompts": 8, "samples": 4, "max_response_tokens": 6, "max_sequences": 32},
    "algorithm": {"name": "grpo", "mini_batches": 2, "kl": {"place": "loss", "coefficient": 0.05}},
    "actor": {"optimizer": {"learning_rate": 3e-3}},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 2},
}


def trained(folder: Path, **changes: Any) -> RunFolder:
    """Train in a folder; return the run."""
    return RunFolder(Path(train(TrainConfig.model_validate(SMALL | changes), run_folder=str(folder))))


@pytest.fixture(scope="module")
def usual(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of the usual dataflow."""
    return trained(tmp_path_factory.mktemp("usual") / "run")


def test_the_usual_steps_in_a_dataflow_train_alike(usual: RunFolder, tmp_path: Path) -> None:
    """Weights and figures to the last bit, also where a rank is killed in its update; what it logs is recorded beside.

    Control: `dataflow` with another reward ends elsewhere (below).
    """
    with blows_falling([Blow("update_actor", "2/")]):
        own = trained(tmp_path / "own", dataflow="orders:usual")
    assert weights(own) == weights(usual)
    figures = [(number, {k: v for k, v in found.items() if k != "own/kl"}) for number, found in numbers(own)]
    assert figures == numbers(usual)
    assert [("own/kl" in found["metrics"]) for found in read_metrics(own)] == [False, True, True, True]


@pytest.mark.exhaustive
def test_an_added_reward_trains_as_one_function_of_both(usual: RunFolder, tmp_path: Path) -> None:
    """Bit for bit, from a function in the workers and from numbers; the part has a column and a figure.

    Control: without it the policy is another.
    """
    one = trained(tmp_path / "one", reward={"function": "orders:both"})
    by_function = trained(tmp_path / "function", dataflow="orders:with_bonus")
    by_numbers = trained(tmp_path / "numbers", dataflow="orders:with_numbers")
    assert weights(one) == weights(by_function) == weights(by_numbers) != weights(usual)
    columns = read_columns(by_function.experience(3), ["reward", "reward/short"])
    assert columns["reward"].tolist() == read_columns(one.experience(3), ["reward"])["reward"].tolist()
    assert "reward/short" not in column_names(one.experience(3))
    assert read_metrics(by_function)[3]["metrics"]["reward/short_mean"] == columns["reward/short"].mean()
    assert read_metrics(by_function)[3]["metrics"]["reward/mean"] == columns["reward"].mean()


def test_a_program_trains_is_told_and_goes_on(usual: RunFolder, tmp_path: Path) -> None:
    """`penstock.train` ends as the flow does; a callback that raises ends it, and its resume ends there, too.

    A dataflow that is no module's belongs to the program: nobody else goes on with its run.
    """
    told: list[int] = []

    def stops(number: int, metrics: dict[str, float]) -> None:
        told.append(number)
        if told == [0, 1, 2]:
            raise LookupError("enough")

    def steps(step: penstock.Iteration) -> None:
        step.rollout()
        step.reward()
        step.advantage()
        step.update()

    with pytest.raises(LookupError, match="enough") as ended:
        penstock.train(SMALL, run_folder=tmp_path / "run", dataflow=steps, callbacks=[stops])
    assert "penstock train --resume" in ended.value.__notes__[0]
    with pytest.raises(UserError, match="was given by a program"):
        penstock.train(resume=tmp_path / "run")
    run = penstock.train(resume=tmp_path / "run", dataflow=steps, callbacks=[stops])
    assert told == [0, 1, 2, 3]
    assert weights(RunFolder(run.folder)) == weights(usual)
    assert run.metrics["reward/mean"].tolist()[1:] == penstock.Run(usual.path).metrics["reward/mean"].tolist()[1:]
    assert run.summary["status"] == "completed"
    assert len(run.experience(3)) == 32
    assert run.model.is_dir()


def test_a_dataflow_may_learn_nothing(tmp_path: Path) -> None:
    """Without an update the policy stays what it was, and the iterations are recorded all the same."""
    run = trained(tmp_path / "run", dataflow="orders:without_update", iterations=2)
    first, last = run.model("initial") / "model.safetensors", run.model("final") / "model.safetensors"
    assert first.read_bytes() == last.read_bytes()
    assert [record["iteration"] for record in read_metrics(run)] == [0, 1, 2]
    assert sorted(path.name for path in run.experience(1).parent.glob("*.parquet")) == [
        "000001.parquet",
        "000002.parquet",
    ]


def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md, to the letter: both parts of the reward and the figure are recorded."""
    (example,) = [text for text in blocks((ROOT / "docs" / "python.md").read_text(), "python") if "add_reward" in text]
    (tmp_path / "my_dataflow.py").write_text(example, encoding="utf-8")
    polite = "def polite(response, language):\n    return float(language == 'en' and '1' in response)\n"
    (tmp_path / "my_rewards.py").write_text(f"{polite}\ndef low(response):\n    return 1.0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    reward = {"function": "my_rewards:low"}
    run = trained(tmp_path / "run", dataflow="my_dataflow:iteration", iterations=1, reward=reward)
    columns = read_columns(run.experience(1), ["reward", "reward/short", "reward/polite"])
    assert (columns["reward"] == 1.0 + 0.1 * columns["reward/short"] + 0.2 * columns["reward/polite"]).all()
    assert set(columns["reward/polite"]) == {0.0, 1.0}
    assert read_metrics(run)[1]["metrics"]["mine/entropy"] > 0
