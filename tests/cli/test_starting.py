"""What a training's command was given is looked at once, and before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.cli.app import app
from penstock.cli.commands import training
from penstock.cli.prefect import server
from penstock.cli.starting import Asked, new_config
from penstock.configs.schema import TrainConfig
from penstock.data.source import rows_of
from penstock.session.opening import PREFERENCE

RECIPE = """
model: {tiny: {max_positions: 32}}
data: {train: rows.jsonl, heldout: rows.jsonl, max_prompt_tokens: 16}
reward: {function: "penstock.rewards.builtin:exact_match"}
rollout: {prompts: 8, max_response_tokens: 16, max_sequences: 16, kv_cache_gib: 0.01}
"""
ROW = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe; no server is asked or started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "check_server", lambda: None)
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(ROW * 3, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("recipe", "overrides", "changes"),
    [
        (None, None, []),
        ("iterations=6", None, ["iterations=6"]),
        ("iterations=6", ["record.samples=2", "more"], ["iterations=6", "record.samples=2", "more"]),
    ],
)
def test_the_first_change_of_a_resume_stands_in_the_recipes_place(
    recipe: str | None, overrides: list[str] | None, changes: list[str]
) -> None:
    """Whether the others are changes is said with the run's configuration, which knows the keys."""
    assert Asked(recipe and Path(recipe), overrides, None, Path("run")).changes == changes


@pytest.mark.parametrize(("recipe", "run"), [("recipe.yaml", None), (None, "other"), ("iterations=6", "other")])
def test_a_resume_takes_no_recipe_and_no_folder(recipe: str | None, run: str | None) -> None:
    """Controls: the cases above."""
    asked = Asked(recipe and Path(recipe), None, run and Path(run), Path("run"))
    with pytest.raises(UserError, match="--resume continues a run with its own configuration"):
        _ = asked.changes


def test_a_new_run_needs_a_recipe(here: Path) -> None:
    """The remedy is the command's own. Control: with one its configuration is checked, and no folder is made."""
    with pytest.raises(UserError, match=r"(?s)no recipe given.*take that one"):
        new_config(PREFERENCE, Asked(None, None, None, None), "take that one")
    (here / "pairs.yaml").write_text("model: {tiny: {}}\ndata: {train: rows.jsonl}\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no column 'chosen'"):
        new_config(PREFERENCE, Asked(Path("pairs.yaml"), None, None, None), "")
    assert not (here / "runs").exists()


def test_the_flow_has_the_rows_that_its_command_has_checked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file is replaced while a server starts. Control: once the command has ended it is read anew."""
    rows, seen = here / "rows.jsonl", []

    def flow(config: TrainConfig, folder: Path, **_: object) -> None:
        rows.write_text(ROW * 5, encoding="utf-8")
        seen.append(len(rows_of(Path(str(config.data.train)))))

    monkeypatch.setattr(training, "_run_flow", flow)
    app(["train", "recipe.yaml", "--run", "run"], standalone_mode=False)
    assert seen == [3]
    assert len(rows_of(rows)) == 5
