"""Invariants of the terminal's progress: readable lines without a terminal, one live line with one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.reports.progress import TrainingProgress, print_summary, waiting

METRICS = {"reward/mean": 0.5, "actor/kl": 0.0012, "rollout/tokens_per_s": 12345.0}


def _console(*, terminal: bool = False, width: int = 120) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=terminal, color_system=None), text


def test_without_a_terminal_the_first_and_the_last_iteration_are_lines() -> None:
    """Hundreds of quick iterations do not flood a log; phases between tasks do not appear, the others do."""
    console, text = _console()
    with TrainingProgress(console, every_s=3600) as progress:
        progress.phase("starting engines")
        progress.start(200)
        for iteration in range(1, 201):
            progress.phase("rollout")
            progress.advance(iteration, METRICS)
        progress.phase("writing the report")
    lines = text.getvalue().splitlines()
    assert lines[0] == "starting engines"
    assert lines[1].startswith("iteration 1/200  reward 0.500 KL 0.0012 rollout 12,345 tok/s")
    assert lines[2].startswith("iteration 200/200")
    assert lines[3:] == ["writing the report"]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"actor/kl": 0.5, "actor/approx_kl": 0.25}, "KL 0.5"),
        ({"actor/approx_kl": 0.25}, "step KL 0.25"),
        ({"actor/approx_kl": 0.0}, "iteration 1/2"),
    ],
)
def test_two_kls_have_two_names(metrics: dict[str, float], said: str) -> None:
    """That to the reference, and that of the update, which is nothing to show where it is always 0."""
    console, text = _console()
    with TrainingProgress(console, every_s=0) as progress:
        progress.start(2)
        progress.advance(1, metrics)
    assert text.getvalue().split("  ")[1 if "KL" in said else 0] == said
    assert ("KL" in text.getvalue()) == ("KL" in said)


def test_every_iteration_is_a_line_if_lines_need_not_wait() -> None:
    """Negative control: it is the interval that holds lines back."""
    console, text = _console()
    with TrainingProgress(console, every_s=0) as progress:
        progress.start(5, completed=2)
        for iteration in (3, 4, 5):
            progress.advance(iteration, {})
    assert [line.split("  ")[0] for line in text.getvalue().splitlines()] == [
        "iteration 3/5", "iteration 4/5", "iteration 5/5",
    ]  # fmt: skip


def test_an_interrupted_training_ends_with_its_last_iteration() -> None:
    """The line that was held back when the error came is written."""
    console, text = _console()
    with pytest.raises(KeyboardInterrupt), TrainingProgress(console, every_s=3600) as progress:
        progress.start(10)
        for iteration in (1, 2, 3):
            progress.advance(iteration, METRICS)
        raise KeyboardInterrupt
    assert [line.split("  ")[0] for line in text.getvalue().splitlines()] == ["iteration 1/10", "iteration 3/10"]


def test_a_terminal_shows_one_live_line() -> None:
    """The bar carries phase, count, reward, KL and speed, and rewrites itself: no line per iteration."""
    console, text = _console(terminal=True)
    with TrainingProgress(console, every_s=0) as progress:
        progress.start(3)
        for iteration in (1, 2, 3):
            progress.phase("update [actor]")
            progress.advance(iteration, METRICS)
    shown = text.getvalue()
    for part in ("update [actor]", "3/3", "reward 0.500", "KL 0.0012", "rollout 12,345 tok/s"):
        assert part in shown
    assert "iteration 1/3" not in shown


def test_a_line_of_80_columns_is_whole() -> None:
    """Count, figures and clock of a long training are all there; the wide line is in the test before."""
    console, text = _console(terminal=True, width=80)
    with TrainingProgress(console, every_s=0) as progress:
        progress.start(1000)
        progress.phase("update [actor]")
        progress.advance(100, METRICS)
    assert "100/1000 reward 0.500 KL 0.0012 12,345 tok/s 0:00:0" in text.getvalue()


def test_the_last_panel_says_what_was_reached_and_where_to_look() -> None:
    """Accuracy before and after with the rise in points, and the caller's commands as they are."""
    console, text = _console()
    summary = {"status": "completed", "seconds": 61, "accuracy_before": 0.25, "accuracy_after": 0.5}
    summary["heldout_temperature"] = 0.0
    print_summary(console, summary, {"MLflow": "mlflow ui --port [5000]"})
    for part in (
        "training completed",
        "25.0% → 50.0%",
        "+25.0 points, greedy",
        "1 min 01 s",
        "mlflow ui --port [5000]",
    ):
        assert part in text.getvalue()


def test_greedy_accuracy_stands_beside_that_of_sampled_responses() -> None:
    """Each with how its responses were drawn. Control: where all are greedy there is one line."""
    console, text = _console()
    sampled = {"accuracy_before": 0.25, "accuracy_after": 0.5, "heldout_temperature": 1.0}
    summary = {"status": "completed", "seconds": 61, "greedy_before": 0.3, "greedy_after": 0.9}
    print_summary(console, summary | sampled, {})
    assert "30.0% → 90.0%  +60.0 points, greedy" in text.getvalue()
    assert "25.0% → 50.0%  +25.0 points, sampled at temperature 1" in text.getvalue()
    console, text = _console()
    print_summary(console, summary | sampled | {"heldout_temperature": 0.0}, {})
    assert text.getvalue().count("points") == 1


def test_where_to_look_is_never_broken() -> None:
    """A path that is longer than the terminal stays one line, to be copied. Control: the panel above is as wide."""
    console, text = _console(width=40)
    path = "/a/long/path/of/a/run/that/no/narrow/terminal/has/room/for/report/index.html"
    print_summary(console, {"status": "completed", "seconds": 61}, {"Run folder": "runs/x", "Report": path})
    assert text.getvalue().splitlines()[-2:] == ["Run folder  runs/x", f"Report      {path}"]
    assert all(len(line) <= 40 for line in text.getvalue().splitlines()[:-1])


def test_before_the_iterations_a_narrow_terminal_shows_the_whole_stage() -> None:
    """There are no figures yet, so none has a place. Control: with iterations they have theirs."""
    console, text = _console(terminal=True, width=80)
    with TrainingProgress(console) as progress:
        progress.phase("loading models into DeepSpeed and vLLM")
        progress._bar.refresh()
        before = text.getvalue()
        progress.start(3)
        progress.advance(1, METRICS)
        progress._bar.refresh()
    assert "loading models into DeepSpeed and vLLM" in before
    assert "ETA" not in before
    assert "/?" not in before
    assert "1/3" in text.getvalue().removeprefix(before)
    assert "ETA" in text.getvalue().removeprefix(before)


def test_after_the_iterations_a_narrow_terminal_shows_the_whole_stage() -> None:
    """What is waited for last has the line for itself, too. Control: during the iterations it is cut."""
    console, text = _console(terminal=True, width=80)
    with TrainingProgress(console) as progress:
        progress.start(2)
        progress.phase("writing the trained model")
        progress._bar.refresh()
        progress.advance(2, METRICS)
        before = text.getvalue()
        progress.phase("writing the trained model")
        progress._bar.refresh()
    assert "writing the trained model" not in before
    assert "writing the trained model" in text.getvalue().removeprefix(before)


def test_the_clock_starts_anew_with_a_phase_and_not_with_its_detail() -> None:
    """The seconds are those of what the line names; within the iterations they are those of all iterations."""
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, get_time=lambda: now[0])
    with TrainingProgress(console) as progress:

        def seconds() -> float | None:
            return progress._bar.tasks[0].elapsed

        progress.phase("reading prompts")
        now[0] = 5.0
        assert seconds() == 5.0
        progress.phase("supervised training", "450 steps")
        assert seconds() == 0.0
        now[0] = 7.0
        progress.phase("supervised training", "step 25/450")
        assert seconds() == 2.0
        progress.start(3)
        now[0] = 10.0
        progress.phase("rollout")
        assert seconds() == 3.0


def test_waiting_leaves_nothing_behind() -> None:
    """A terminal shows the line and clears it; a log gets nothing."""
    (terminal, shown), (file, written) = _console(terminal=True), _console()
    for console in (terminal, file):
        with waiting(console, "starting a server"):
            pass
    assert "starting a server" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")
    assert written.getvalue() == ""


STEP = {"loss": 0.6931, "accuracy": 0.75, "tokens_per_s": 12345.0, "grad_norm": 1.0}


def test_steps_are_counted_as_steps() -> None:
    """With loss, accuracy and speed, each where it is there. Who looks on elsewhere hears of some. Control: of all."""
    console, text = _console()
    told: list[str] = []
    with TrainingProgress(console, every_s=0, tell=told.append) as progress:
        progress.start(3, completed=1, unit="step")
        progress.advance(2, STEP, told=False)
        progress.advance(3, {"loss": 0.5})
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("step 2/3  loss 0.693 accuracy 75% 12,345 tok/s")
    assert lines[1].startswith("step 3/3  loss 0.500  ")
    assert told == ["step 3/3, loss 0.500"]


def test_a_line_of_steps_fits_80_columns() -> None:
    """Count, figures and clock of a long training. What was counted before has its own count."""
    console, text = _console(terminal=True, width=80)
    with TrainingProgress(console, every_s=0) as progress:
        progress.start(9)
        progress.start(10_000, unit="step", what="warm-up")
        progress.advance(1000, STEP)
    assert "1000/10000 loss 0.693 75% 12,345 tok/s 0:00:0" in text.getvalue()
    assert "warm-up" in text.getvalue()
