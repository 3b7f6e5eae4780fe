"""The recipe of a chain: what stages may say of each other, and that a mistake is one message that names its stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.configs.chain import Chain, read_chain
from penstock.configs.schema import TrainConfig

BASE = """
model: {tiny: {hidden_size: 96, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 96, max_positions: 64}}
data: {arithmetic: {digits: 2, train: 32, heldout: 8, sft: 32}, max_prompt_tokens: 8}
reward: {function: "penstock.rewards.builtin:exact_match", settings: {suffix: "."}}
rollout: {prompts: 4, samples: 2, max_response_tokens: 6}
sft: {steps: 2, batch: 8}
"""
CHAIN = """
name: sums
stages:
  imitate: {does: sft, base: base.yaml}
  learn:
    does: train
    base: base.yaml
    sft: null
    model: {tiny: null, path: stage:imitate}
    iterations: 2
  best: {does: select, run: stage:learn, best: 2}
  judge: {does: reward-model, model: {path: stage:imitate}, data: {train: stage:best}}
"""


def read(folder: Path, text: str = CHAIN, *overrides: str) -> Chain:
    """Return the chain of a recipe in a folder, with the recipe that it builds on beside it."""
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "chain.yaml").write_text(text, encoding="utf-8")
    return read_chain(folder / "chain.yaml", overrides)


def test_stages_are_recipes_and_say_what_they_need_of_others(tmp_path: Path) -> None:
    """In the order in which they are written, each laid over its own base."""
    chain = read(tmp_path)
    assert [(stage.name, stage.does, stage.named) for stage in chain.stages] == [
        ("imitate", "sft", {}),
        ("learn", "train", {"model.path": "imitate"}),
        ("best", "select", {"run": "learn"}),
        ("judge", "reward-model", {"model.path": "imitate", "data.train": "best"}),
    ]
    config = chain.stage("learn").with_values({"model.path": "models/x"}).config(TrainConfig)
    assert (config.model.path, config.model.tiny, config.sft, config.rollout.prompts) == ("models/x", None, None, 4)
    assert (chain.name, chain.folder, config.name, config.folder) == ("sums", "runs", "learn", "runs")


def test_a_chain_is_kept_whole(tmp_path: Path) -> None:
    """What is written reads back to the same, also when the recipes that it names have changed."""
    chain = read(tmp_path, CHAIN, "learn.iterations=5", "name=others")
    (tmp_path / "base.yaml").write_text("iterations: [", encoding="utf-8")
    kept = tmp_path / "kept.yaml"
    kept.write_text(chain.to_yaml(), encoding="utf-8")
    assert read_chain(kept) == chain
    assert chain.stage("learn").tree["iterations"] == 5 and chain.name == "others"


@pytest.mark.parametrize(
    ("text", "overrides", "told"),
    [
        ("name: x", (), "chain.yaml is no chain: stages"),
        ("stages: {}", (), "chain.yaml is no chain: stages"),
        (CHAIN + "other: 1", (), "chain.yaml is no chain: other"),
        (CHAIN.replace("does: sft", "does: sfft"), (), "stage 'imitate': 'does' is one of .* did you mean 'sft'"),
        (CHAIN.replace("iterations: 2", "iteration: 2"), (), "stage 'learn': .*iteration: unknown key"),
        (CHAIN.replace("best: 2", "best: 0"), (), "stage 'best': .*best"),
        (CHAIN.replace("best: 2", "pairs: true, best: 2"), (), "'best' has no effect with 'pairs'"),
        (CHAIN.replace("best: 2", "margin: 2"), (), "'margin' has no effect without 'pairs'"),
        (CHAIN.replace("run: stage:learn", "run: runs/x"), (), "stage 'best': 'run' is runs/x"),
        (CHAIN.replace("path: stage:imitate}\n", "path: stage:best}\n"), (), "no earlier stage has that name"),
        (
            CHAIN.replace("run: stage:learn", "run: stage:imitate"),
            (),
            "'run' is stage:imitate, a stage that does 'sft'",
        ),
        (
            CHAIN.replace("train: stage:best", "train: stage:learn"),
            (),
            "'data.train' is stage:learn, a stage that does",
        ),
        (CHAIN.replace("best: 2", "best: stage:learn"), (), "'best' is stage:learn, and no stage leaves what it wants"),
        (CHAIN.replace("  imitate:", "  a b:"), (), "'a b' is no name of a stage"),
        (CHAIN, ("lern.iterations=3",), "begins with no stage's name; did you mean 'learn'"),
        (CHAIN, ("learn.iteration=3",), "names no key"),
        (CHAIN, ("iterations=3",), "begins with no stage's name"),
    ],
    ids=[str(number) for number in range(17)],
)
def test_mistakes_are_one_message(text: str, overrides: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """Of the chain, of a stage, or of what one wants of another."""
    with pytest.raises(UserError, match=f"(?s){told}"):
        read(tmp_path, text, *overrides)


def test_a_form_names_recipes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a training: a file elsewhere is refused, and one in the working folder is taken."""
    read(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match="elsewhere|may lie|lies"):
        read_chain(tmp_path / "chain.yaml", anywhere=False)
    monkeypatch.chdir(tmp_path)
    assert len(read_chain(Path("chain.yaml"), anywhere=False).stages) == 4
