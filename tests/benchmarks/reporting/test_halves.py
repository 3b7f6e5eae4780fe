"""A benchmark that is cut off in its second training goes on with that one, and combines no halves of other work."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks import waiting
from penstock.benchmarks.gateway import measuring
from penstock.benchmarks.reporting.halves import file_beside, forget_half, scratch_folder
from penstock.benchmarks.reporting.result import BenchResult, read_result, write_result
from penstock.state.run_folder import RunFolder

ROW = {
    "time/iteration_s": 4.0,
    "rollout/tokens": 900.0,
    "rollout/tokens_per_s": 225.0,
    "rollout/turns_mean": 1.5,
    "reward/mean": 0.5,
}
AGENT = "penstock.environments.calculator:CalculatorAgent"


def _waiting(overrides: list[str], **more: Any) -> BenchResult:
    asked = ["iterations=3", *overrides]
    recipe = Path("configs/bench_slow_environment.yaml")
    return waiting.measure(recipe, asked, "the command", skip=1, synchronous=2, lognormal=False, **more)


def _gateway(overrides: list[str], **more: Any) -> BenchResult:
    recipe = Path("configs/calculator.yaml")
    return measuring.measure(recipe, ["iterations=3", *overrides], "the command", agent=AGENT, skip=1, **more)


class Trainings:
    """In place of trainings: which were asked for, and in which one the command is cut off."""

    def __init__(self, cut_off: int | None) -> None:
        self.asked: list[str] = []
        self.cut_off = cut_off

    def __call__(
        self, recipe: Path, overrides: Sequence[str], folder: Path, program: str = ""
    ) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
        """Train, or be cut off after an iteration."""
        self.asked.append(folder.name)
        folder.mkdir()
        RunFolder(folder).metrics.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
        if len(self.asked) == self.cut_off:
            raise KeyboardInterrupt
        return [ROW] * 3, {}


WAITING, GATEWAY = (_waiting, waiting, "synchronous", "recipe"), (_gateway, measuring, "inside", "asked")


@pytest.fixture(params=[WAITING, GATEWAY])
def cut_off(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cut a benchmark off in its second training; return it, its result file, the names of both and what was said."""
    measure, module, first, second = request.param
    out, said = tmp_path / "result.json", list[str]()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "trained", Trainings(cut_off=2))
    with pytest.raises(KeyboardInterrupt):
        measure([], out=out, say=said.append)
    trainings = Trainings(cut_off=None)
    monkeypatch.setattr(module, "trained", trainings)
    return measure, out, first, second, said, trainings


def test_the_same_command_goes_on_with_the_half_that_is_missing(cut_off: Any) -> None:
    """And gives what it gives in one go. Control: without the kept half it trains both."""
    measure, out, first, second, said, trainings = cut_off
    assert read_result(file_beside(out)).details[0]["mode"] == first and not out.exists()
    assert str(file_beside(out)) in said[0] and second in said[0]
    resumed = measure([], out=out)
    assert trainings.asked == [second]
    forget_half(out)
    whole = measure([], out=out)
    assert trainings.asked[1:] == [first, second]
    assert resumed == whole


def test_nothing_is_said_to_be_kept_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a half that another result has. Control: of one that was measured, while the other is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(waiting, "trained", Trainings(cut_off=None))
    said = list[str]()
    first = _waiting([], out=tmp_path / "first.json", say=said.append)
    _waiting([], out=tmp_path / "second.json", say=said.append, against=first)
    assert ["is kept in" in line for line in said] == [True, False]
    assert not file_beside(tmp_path / "second.json").exists()


def test_metrics_of_the_half_that_was_cut_off_stay(cut_off: Any, tmp_path: Path) -> None:
    """The last message names them. Control: what ends leaves no folder, nor does what had no iteration yet."""
    measure, out, _, second, said, _ = cut_off
    (named,) = (line for line in said[1:] if f"/{second}/" in line)
    metrics = Path(named.split(": ")[1])
    assert json.loads(metrics.read_text(encoding="utf-8")) == ROW
    before = set(tmp_path.iterdir())
    measure([], out=out)
    with pytest.raises(UserError), scratch_folder(said.append) as scratch:
        (scratch / "run").mkdir()
        raise UserError("the training ended with exit code 2", "its messages are above")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("overrides", "changed", "named"),
    [
        (["seed=3"], {}, "seed"),
        (["evaluate.temperature=0.5"], {}, "evaluate.temperature"),  # results keep no such section
        (["iterations=4", "rollout.samples=4"], {}, "rollout.samples"),
        ([], {"machine": "8 x another GPU"}, "machine"),
        ([], {"commit": "0" * 40}, "commit"),
        ([], {"versions": {"python": "3.11.7", "torch": "1.0"}}, "versions.torch"),
        ([], {"bench": "step"}, "bench"),
    ],
)
def test_halves_of_other_work_are_not_combined(
    overrides: list[str], changed: dict[str, Any], named: str, cut_off: Any
) -> None:
    """Refused before anything is trained, and the half stays. Control: above."""
    measure, out, _, _, _, trainings = cut_off
    kept = read_result(file_beside(out)).model_copy(update=changed)
    write_result(file_beside(out), kept)
    with pytest.raises(UserError, match=rf"half.json, the half that has ended, differs in .*\b{named}\b"):
        measure(overrides, out=out)
    assert trainings.asked == [] and read_result(file_beside(out)) == kept


@pytest.mark.parametrize("cut_off", [WAITING], indirect=True)
def test_a_half_that_is_kept_may_be_compared_with(cut_off: Any) -> None:
    """By --against: another way not to wait has the same twin. Control: of another seed it is refused."""
    measure, out, _, second, _, trainings = cut_off
    half = read_result(file_beside(out))
    measure(["rollout.tail.extra=0.5"], against=half)
    assert trainings.asked == [second]
    with pytest.raises(UserError, match="differs in seed"):
        measure(["seed=3"], against=half)
