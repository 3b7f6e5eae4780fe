"""A chain planned: mistakes in later stages are seen before the first, and what is done is told from what is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.base.errors import UserError
from penstock.configs.chain import read_chain
from penstock.session.chains import plan
from penstock.session.chains.plan import (
    CHAIN_TAG,
    begin,
    begin_chain,
    check,
    config_of,
    is_done,
    planned,
    read_chain_of,
    selection_of,
    stages_left,
)
from penstock.session.chains.running import running_chain, unbegun
from penstock.state.chain import ChainFolder, is_chain
from penstock.trackers.mlflow import default_tracking_uri
from tests.configs.test_chain import BASE, CHAIN


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A chain in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    Path("chain.yaml").write_text(CHAIN, encoding="utf-8")
    return "chain.yaml"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("learn.reward.function=penstock.rewards.builtin:exact_macht", "stage 'learn': .*exact_macht"),
        ("learn.data.max_prompt_tokens=2", "stage 'learn': "),
        ("imitate.data.arithmetic=null", "stage 'imitate': "),
    ],
)
def test_a_mistake_in_a_later_stage_is_seen_before_the_first(recipe: str, override: str, told: str) -> None:
    """Of a stage whose model is yet to be made, too. Control: the chain without it is planned."""
    planned(recipe, [], anywhere=True)
    with pytest.raises(UserError, match=told):
        planned(recipe, [override], anywhere=True)
    assert not Path("runs").exists(), "nothing is written before the chain begins"


def test_stages_get_what_earlier_ones_leave(recipe: str) -> None:
    """Models and files in the chain's folder, whatever becomes of the recipe."""
    folder = begin(planned(recipe, ["judge.trainer.steps=7"], anywhere=True))
    Path(recipe).unlink()
    chain = read_chain_of(folder)
    judge = config_of(folder, chain.stage("judge"))
    assert (judge.model.path, judge.data.train, judge.trainer.steps) == (
        str(folder.path / "imitate" / "models" / "sft"),
        str(folder.path / "best.jsonl"),
        7,
    )
    run, selection = selection_of(folder, chain.stage("best"))
    assert (run, selection.best) == (folder.path / "learn", 2)
    assert folder.path.name.startswith("sums-chain-") and is_chain(folder.path)


def test_what_is_done_is_told_from_what_is_left(recipe: str) -> None:
    """A file that was selected is done; a folder without a manifest begins anew, and what it has goes."""
    folder = begin(planned(recipe, [], anywhere=True))
    stages = {stage.name: stage for stage in read_chain_of(folder).stages}
    assert [stage.name for stage in stages_left(folder)] == list(stages)
    folder.left_by(stages["best"]).write_text("{}\n", encoding="utf-8")
    assert is_done(folder, stages["best"]) and not is_done(folder, stages["learn"])
    begun = folder.run(stages["imitate"])
    begun.path.mkdir()
    begun.config.write_text("name: x\n", encoding="utf-8")
    assert unbegun(folder, stages["imitate"]) and not begun.path.exists()


def test_one_process_at_a_time(recipe: str) -> None:
    """A second one is refused; so is a folder that holds no chain."""
    folder = begin(planned(recipe, [], anywhere=True))
    with running_chain(folder), pytest.raises(UserError, match="another process"), running_chain(folder):
        pass
    with pytest.raises(UserError, match="holds no chain"):
        stages_left(ChainFolder(Path("runs")))


def test_a_form_begins_a_chain_or_goes_on_with_one(recipe: str) -> None:
    """One of the two."""
    folder = begin_chain(recipe, None, None)
    assert begin_chain(recipe, None, str(folder.path)) == folder
    with pytest.raises(UserError, match="goes on as it was asked for"):
        begin_chain(None, ["learn.iterations=3"], str(folder.path))
    with pytest.raises(UserError, match="no recipe"):
        begin_chain(None, None, None)


def test_a_flow_run_that_is_run_again_goes_on_with_its_chain(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tag that it has given itself. Controls: at its first attempt, or without the folder, one begins anew."""
    folder = begin(planned(recipe, [], anywhere=True))
    runtime = SimpleNamespace(run_count=2, id=None, tags=[f"{CHAIN_TAG}{folder.path.name}", "other"])
    monkeypatch.setattr(plan, "flow_run", runtime)
    assert begin_chain(recipe, None, None) == folder
    runtime.run_count = 1
    assert begin_chain(recipe, None, None) != folder
    runtime.run_count = 2
    folder.chain.unlink()
    assert begin_chain(recipe, None, None) != folder


def test_stages_are_recorded_beside_other_runs(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store of the directory that the chain's folder is in. Control: another folder has its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = begin(planned(recipe, [], anywhere=True))
    assert default_tracking_uri(folder.path) == default_tracking_uri(Path("runs"))
    assert default_tracking_uri(Path("other")) != default_tracking_uri(Path("runs"))


def test_the_recipe_of_the_repository_can_begin() -> None:
    """Every stage of it that can be checked ahead."""
    chain = read_chain(Path(__file__).parents[3] / "configs" / "chain.yaml")
    check(chain)
    assert {stage.does for stage in chain.stages} == {"sft", "train", "select", "reward-model"}
