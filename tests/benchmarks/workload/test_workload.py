"""The work is the peers' work, and made-up experience is what an update can be fed with."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.peers import run_trl, run_trl_cpu, run_verl
from penstock.base.errors import UserError
from penstock.benchmarks.workload.digit_reward import share_of_digits
from penstock.benchmarks.workload.experience import fixed_lengths, lengths_named, lognormal_lengths, write_experience
from penstock.benchmarks.workload.prompts import problems_of, prompts, with_prompts, write_prompts
from penstock.cli.commands.bench import app as bench
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.data.order import epoch_order
from penstock.data.source import split_of
from penstock.engines.training.trainer import learning_rate_factor
from penstock.rewards.builtin import exact_match
from penstock.state.experience import read_columns

ROOT = Path(__file__).resolve().parents[3]
FIRST_LETTERS = "mynbiqpmzjplsgqejeyd"  # of the peers' first prompt


def test_prompts_are_those_of_the_peers() -> None:
    """Drawn here letter by letter from one generator, as the peers' script does; another order gives other rows."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    expected = []
    for _ in range(1024):
        row = ""
        for _ in range(256):
            row += generator.choice(letters)
        expected.append(row)
    assert prompts() == expected
    assert prompts()[0].startswith(FIRST_LETTERS)
    assert prompts(2, 128)[1] == expected[0][128:]  # the control: another length shifts every row but the first


def test_a_recipe_without_data_gets_files_of_prompts(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {max_prompt_tokens: 12}\nrollout: {prompts: 2000}", encoding="utf-8")
    config = load_config(recipe, with_prompts(load_config(recipe), tmp_path))
    rows = [json.loads(line)["prompt"] for line in Path(str(config.data.train)).read_text().splitlines()]
    held = [json.loads(line)["prompt"] for line in Path(str(config.data.heldout)).read_text().splitlines()]
    assert rows == prompts(2000, 12)
    assert held
    assert not set(held) & set(rows)


def test_a_recipe_with_data_keeps_its_own(tmp_path: Path) -> None:
    for data in ({"train": "own.jsonl"}, {"arithmetic": {}}):
        assert with_prompts(TrainConfig.model_validate({"data": data}), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_is_the_peers_work() -> None:
    """The table of the comparison: 64 x 8 samples of exactly 256 + 1,024 tokens, one step, no reference."""
    config = load_config(ROOT / "configs" / "bench_grpo.yaml")
    rollout, algorithm = config.rollout, config.algorithm
    assert (rollout.prompts, rollout.samples, rollout.max_response_tokens, rollout.ignore_eos) == (64, 8, 1024, True)
    assert (config.data.max_prompt_tokens, config.actor.optimizer.learning_rate) == (256, 1e-6)
    assert (algorithm.name, algorithm.kl, algorithm.on_policy) == ("grpo", None, True)
    assert "reference" not in config.roles
    assert config.evaluate.every == 0
    assert config.checkpoint.every == 0


def test_peers_are_told_the_recipes_work(tmp_path: Path) -> None:
    """The prompts as one file, and the numbers in each system's own words; YAML's 1e-6 would be text for TRL."""
    file = tmp_path / "prompts.jsonl"
    assert CliRunner().invoke(bench, ["prompts", str(file)]).exit_code == 0
    assert [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()] == prompts()

    trl = run_trl.settings(3, 16, "output")
    assert trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] == 64 * 8
    assert (trl["num_generations"], trl["max_completion_length"], trl["learning_rate"]) == (8, 1024, 1e-6)

    verl = run_verl.settings("model", "prompts.parquet", 3)
    assert [verl[f"data.{name}"] for name in ("train_batch_size", "max_prompt_length", "max_response_length")] == [
        *(64, 256, 1024)
    ]
    assert (verl["actor_rollout_ref.rollout.n"], float(verl["actor_rollout_ref.actor.optim.lr"])) == (8, 1e-6)
    assert [row["prompt"][0]["content"] for row in run_verl.table(file).to_dict("records")] == prompts()


def test_peers_rewards_are_the_recipes(tmp_path: Path) -> None:
    """Each calls a function of its own kind; the control has no digits."""
    for text, share in (("a1b2", 0.5), ("abc", 0.0), ("", 0.0)):
        assert run_trl.share_of_digits([text], completion_ids=[[]]) == [share]
        assert run_verl.share_of_digits("letters", text, "", {"index": 0}) == share == share_of_digits(text)


def written(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_recipes_problems_lie_in_the_order_of_its_training(tmp_path: Path) -> None:
    """A second epoch has an order of its own. Controls: another seed has other problems, and refused options."""
    recipe, train, heldout = (tmp_path / name for name in ("recipe.yaml", "train.jsonl", "heldout.jsonl"))
    recipe.write_text(
        "iterations: 3\nrollout: {prompts: 4}\nevaluate: {prompts: 5}\n"
        "data: {arithmetic: {sft: 3, train: 7, heldout: 6}}\n",
        encoding="utf-8",
    )
    asked = ["prompts", str(train), "seed=2", "--recipe", str(recipe), "--heldout", str(heldout)]
    assert CliRunner().invoke(bench, asked).exit_code == 0
    config = load_config(recipe, ["seed=2"])
    frame = split_of(config, "train")[["prompt", "answer"]]
    rows = [*epoch_order(7, 2, 0, shuffle=True), *epoch_order(7, 2, 1, shuffle=True)][:12]
    assert written(train) == frame.iloc[rows].to_dict("records")
    assert written(heldout) == split_of(config, "heldout")[["prompt", "answer"]][:5].to_dict("records")
    assert problems_of(load_config(recipe))["train"] != written(train)
    for wrong in (["prompts", str(train), "seed=2"], ["prompts", str(train), "--heldout", str(heldout)]):
        with pytest.raises(UserError, match="name the recipe with --recipe"):
            CliRunner().invoke(bench, wrong, catch_exceptions=False)
    with pytest.raises(UserError, match="--letters has no effect"):
        CliRunner().invoke(bench, [*asked, "--letters", "3"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": "own.jsonl"}}, "has no 'data.arithmetic'"),
        ({"data": {"arithmetic": {}, "sampler": {"name": "adaptive"}}}, "follows from what is sampled"),
    ],
)
def test_problems_that_follow_from_a_training_are_refused(sections: dict[str, object], message: str) -> None:
    """The control is the recipe above."""
    with pytest.raises(UserError, match=message):
        problems_of(TrainConfig.model_validate(sections))


@pytest.mark.parametrize("name", ["quickstart", "careless"])
def test_trl_on_a_cpu_is_told_the_recipes_work(name: str) -> None:
    """What the program takes from quickstart.yaml, or says by itself, is in force in both recipes."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    trl, rollout, optimizer = run_trl_cpu.settings(3, 4, 5, "output"), config.rollout, config.actor.optimizer
    rows = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    assert (rows * config.algorithm.mini_batches, rollout.samples) == (128 * 8, trl["num_generations"])
    assert trl["steps_per_generation"] == config.algorithm.mini_batches * trl["gradient_accumulation_steps"]
    assert trl["max_steps"] == 3 * trl["logging_steps"] == 3 * config.algorithm.mini_batches
    assert (trl["max_completion_length"], trl["temperature"]) == (rollout.max_response_tokens, rollout.temperature)
    assert (optimizer.betas, optimizer.eps) == (run_trl_cpu.BETAS, run_trl_cpu.EPSILON)
    assert optimizer.max_grad_norm == trl["max_grad_norm"]
    assert (optimizer.weight_decay, config.algorithm.kl, config.evaluate.temperature) == (0.0, None, 1.0)
    assert config.algorithm.settings["clip_low"] == config.algorithm.settings["clip_high"] == trl["epsilon"]
    assert config.algorithm.aggregation == "token-mean"
    assert optimizer.learning_rate == float(run_trl_cpu.WORK["actor"]["optimizer"]["learning_rate"])
    assert config.iterations == run_trl_cpu.WORK["iterations"]
    for step in (0, 1, 18, 19, 20, 59):  # the control of a schedule that begins at 0 would differ at once
        assert run_trl_cpu.warm_up(step) == learning_rate_factor(step, 60, optimizer)
    suffix = config.reward.settings["suffix"]
    for text in ("046.", "046", "047.", " 046. ", "046.."):
        assert run_trl_cpu.exact_match([text], answer=["046"], prompts=[""]) == [exact_match(text, "046", suffix)]


def test_lognormal_lengths_have_a_tail_that_is_cut() -> None:
    lengths = lognormal_lengths(20_000, 256, 600, 4096)
    responses_B = lengths.responses_B
    assert 550 < responses_B.mean() < 600  # the cut takes some of the mean
    assert (responses_B.min(), responses_B.max()) >= (1, 4096)
    assert (responses_B == 4096).sum() > 1
    assert np.median(responses_B) < 0.7 * responses_B.mean()
    assert np.array_equal(responses_B, lognormal_lengths(20_000, 256, 600, 4096).responses_B)
    assert lengths.tokens == 20_000 * 256 + responses_B.sum()


def test_lengths_are_named_with_all_that_they_need() -> None:
    """A mean or a cut that would change nothing cannot be given, and one that is missing is asked for."""
    config = TrainConfig(rollout={"prompts": 3, "samples": 2, "max_response_tokens": 7}, data={"max_prompt_tokens": 5})
    fixed, tail = lengths_named("fixed", config), lengths_named("lognormal:9:30", config)
    assert (fixed.prompts_B.tolist(), fixed.responses_B.tolist()) == ([5] * 6, [7] * 6)
    assert np.array_equal(tail.responses_B, lognormal_lengths(6, 5, 9, 30).responses_B)
    assert (lengths_named("branched:50", config).trunk, fixed.trunk) == (3, 0)
    for name in (
        "lognormal",
        "lognormal:9",
        "fixed:9:30",
        "lognormal:0:30",
        "lognormal:9:x",
        "branched",
        "branched:100",
    ):
        with pytest.raises(UserError, match=f"--lengths is '{name}'"):
            lengths_named(name, config)


def test_experience_has_the_lengths_and_one_advantage_per_row(tmp_path: Path) -> None:
    lengths = lognormal_lengths(16, 5, 9, 30)
    ref = write_experience(tmp_path / "a.parquet", lengths, 64, -1, samples=4)
    columns = read_columns(ref.path, ["prompt_tokens", "response_tokens", "loss_mask", "advantages", "returns"])
    assert (ref.samples, ref.prompt_tokens, ref.response_tokens) == (16, 80, int(lengths.responses_B.sum()))
    for name in ("response_tokens", "loss_mask", "advantages", "returns"):
        assert np.array_equal(columns[name].lengths_B, lengths.responses_B)
    tokens = columns["response_tokens"].values_T
    assert 0 <= tokens.min() < tokens.max() < 64
    assert len(set(tokens.tolist())) > 30
    advantages = columns["advantages"]
    assert all(len(set(advantages.row(row).tolist())) == 1 for row in range(16))
    assert len(set(advantages.values_T.tolist())) == 16
    prompts = [tuple(columns["prompt_tokens"].row(row)) for row in range(16)]
    assert [len(set(prompts[start : start + 4])) for start in range(0, 16, 4)] == [1] * 4
    assert len(set(prompts)) == 4


def test_responses_to_a_prompt_begin_alike_where_they_branch(tmp_path: Path) -> None:
    """Control: behind that, and between prompts, they differ; without a trunk they differ at once."""
    whole = fixed_lengths(6, 5, 20)
    for trunk in (8, 0):
        path = write_experience(tmp_path / f"{trunk}.parquet", replace(whole, trunk=trunk), 64, -1, samples=3).path
        responses = read_columns(path, ["response_tokens"])["response_tokens"]
        begins = [tuple(responses.row(row)[: trunk or 8]) for row in range(6)]
        assert len(set(begins)) == (2 if trunk else 6)
        assert len({tuple(responses.row(row)[trunk:]) for row in range(6)}) == 6


def test_experience_is_the_same_every_time(tmp_path: Path) -> None:
    """Otherwise two builds could not be compared loss by loss."""
    lengths = fixed_lengths(4, 3, 6)
    files = [write_experience(tmp_path / f"{name}.parquet", lengths, 64, -1, 2).path for name in "ab"]
    names = ["prompt_tokens", "response_tokens", "advantages"]
    first, second = (read_columns(path, names) for path in files)
    assert all(np.array_equal(first[name].values_T, second[name].values_T) for name in names)


def test_files_of_prompts_say_where_they_are(tmp_path: Path) -> None:
    assert write_prompts(tmp_path, 4, 3) == {
        "data.train": str(tmp_path / "train.jsonl"),
        "data.heldout": str(tmp_path / "heldout.jsonl"),
    }
