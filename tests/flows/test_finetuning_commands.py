"""Commands that train offline, from the recipe to the last line that they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.cli.prefect import server
from penstock.state.run_folder import RunFolder

pytestmark = pytest.mark.slow

MODEL = "model: {tiny: {hidden_size: 64, layers: 1, heads: 2, kv_heads: 2, intermediate_size: 96}}"
RECIPES = {
    "sft": """
data: {arithmetic: {digits: 1, sft: 32, train: 8, heldout: 8}}
sft: {steps: 2, batch: 16}
""",
    "preference": """
data: {train: pairs.jsonl, heldout: pairs.jsonl}
trainer: {steps: 2, batch: 4}
""",
}
PAIR = json.dumps({"prompt": "1+1=", "chosen": "2.", "rejected": "3."}) + "\n"


@pytest.mark.parametrize(("command", "model", "measured"), [("sft", "sft", False), ("preference", "final", True)])
@pytest.mark.usefixtures("prefect_harness")
def test_a_command_ends_well_and_names_its_model(
    command: str,
    model: str,
    measured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a panel, as `train`: the accuracy on held-out pairs; prompts with responses have none, the control."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["penstock", command, "recipe.yaml", "--run", "run"])
    monkeypatch.setattr(
        "penstock.cli.libraries.quiet_libraries", lambda: None
    )  # it sets variables of the whole process
    monkeypatch.setattr(server, "start_server", lambda: None)  # the harness has one
    (tmp_path / "pairs.jsonl").write_text(PAIR * 8, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(f"{MODEL}\n{RECIPES[command]}", encoding="utf-8")
    cli.main()
    said = capsys.readouterr().out
    for label, path in {
        "Model": tmp_path / "run" / "models" / model,
        "Report": RunFolder(tmp_path / "run").report,
    }.items():
        assert f"{label} " in said
        assert f" {path}\n" in said
        assert path.exists()
    assert "training completed" in said
    assert "step 2/2  loss " in said
    assert "Loss" in said
    page = RunFolder(tmp_path / "run").report.read_text(encoding="utf-8")
    assert f"penstock {command}" not in page, "nothing is left to resume"
    assert page.count("<img ") == (2 if command == "sft" else 3)
    assert (tmp_path / "run" / "models" / model / "config.json").is_file()
    assert ("Held-out accuracy" in said) == measured
