"""Peers' figures come from the lines that their logs really have, and the cold first step never counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.peers.logs import trl_figures, verl_figures
from penstock.benchmarks.reporting.result import new_result, read_result, write_result
from penstock.cli.commands.bench_files import peers

TRL = """
Loading checkpoint shards: 100%
TRL step {'wall_s': 63.9, 'peak_gib': 78.1}
{'loss': 0.0, 'grad_norm': 0.02, 'step': 1}
TRL step {'wall_s': 48.1, 'peak_gib': 79.0}
TRL step {'wall_s': 47.3, 'peak_gib': 79.0}
TRL step {'wall_s': 48.9, 'peak_gib': 79.2}
TRL step {'wall_s': 48.9, 'peak_gib': 79.2}
TRL step {'train_runtime': 1.0}
"""
# Of run_trl_cpu.py: TRL's own lines lie between, and the peak of the cold step counts as any other's.
TRL_CPU = """
TRL heldout {'accuracy_before': 0.564, 'greedy_before': 0.531}
TRL step {'wall_s': 8.7457, 'generation_s': 1.884, 'reward': 0.58105, 'host_peak_gib': 0.721}
{'loss': '-0.001764', 'grad_norm': '0.6495', 'learning_rate': '6e-05', 'reward': '0.5371', 'step_time': '0.4132'}
TRL step {'wall_s': 0.8433, 'generation_s': 0.1911, 'reward': 0.53711, 'host_peak_gib': 0.7}
TRL step {'wall_s': 0.6911, 'generation_s': 0.1545, 'reward': 0.59473, 'host_peak_gib': 0.7}
TRL step {'wall_s': 0.6898, 'generation_s': 0.1838, 'reward': 0.68652, 'host_peak_gib': 0.7}
{'train_runtime': '15.2', 'train_loss': '-0.003285'}
TRL heldout {'accuracy_after': 0.924, 'greedy_after': 0.964}
"""
# One token per line, as the script greps them; a warm-up line before the first step belongs to none.
VERL_GREPPED = """
timing_s/testing:1.5
step:1
timing_s/gen:44.0
timing_s/step:81.0
perf/mfu/actor:0.21
step:2
timing_s/gen:30.1
timing_s/old_log_prob:7.4
timing_s/update_actor:21.6
timing_s/update_weights:0.27
timing_s/step:61.2
perf/mfu/actor:0.34
perf/max_memory_allocated_gb:36.2
step:3
timing_s/gen:31.1
timing_s/old_log_prob:7.2
timing_s/update_actor:21.8
timing_s/update_weights:0.25
timing_s/step:60.2
perf/mfu/actor:0.36
perf/max_memory_allocated_gb:36.2
"""
VERL_CONSOLE = (
    "(TaskRunner pid=77) step:1 - training/global_step:1 - timing_s/gen:44.0 - timing_s/step:81.0\n"
    "(TaskRunner pid=77) step:2 - training/global_step:2 - timing_s/gen:np.float64(30.5) - perf/mfu/actor:3.4e-1"
    " - timing_per_token_ms/gen:0.06 - timing_s/step:61.0\n"
)


def log(folder: Path, text: str) -> Path:
    path = folder / "peer.log"
    path.write_text(text, encoding="utf-8")
    return path


def test_trl_lines_give_medians_without_the_first(tmp_path: Path) -> None:
    assert trl_figures(log(tmp_path, TRL)) == {"step_s": 48.1, "peak_gib": 79.0}


def test_trl_on_a_cpu_gives_generation_memory_and_what_was_learnt(tmp_path: Path) -> None:
    """Accuracies are those after the training. Control: a log that was cut off before has none."""
    figures = {"step_s": 0.6911, "rollout_s": 0.1838, "reward_mean": 0.59473, "host_peak_gib": 0.721}
    assert trl_figures(log(tmp_path, TRL_CPU)) == {**figures, "accuracy_heldout": 0.924, "accuracy_greedy": 0.964}
    assert trl_figures(log(tmp_path, TRL_CPU.partition("{'train_runtime'")[0])) == figures


def test_verl_lines_give_medians_without_the_first(tmp_path: Path) -> None:
    assert verl_figures(log(tmp_path, VERL_GREPPED)) == pytest.approx(
        {
            "step_s": 60.7,
            "rollout_s": 30.6,
            "old_logprobs_s": 7.3,
            "update_s": 21.7,
            "reshard_s": 0.26,
            "mfu": 0.35,
            "peak_gib": 36.2,
        }
    )


def test_verl_console_lines_are_read_as_well(tmp_path: Path) -> None:
    assert verl_figures(log(tmp_path, VERL_CONSOLE)) == {"step_s": 61.0, "rollout_s": 30.5, "mfu": 0.34}


def test_peers_join_a_result_that_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the result held stays. Control: without a place to write to nothing is read."""
    path = tmp_path / "step.json"
    write_result(path, new_result("step", "the first command", {"step_s": 17.0}, peers={"verl": {"step_s": 60.0}}))
    monkeypatch.setattr("sys.argv", ["penstock", "bench", "peers", "--into", "step.json"])
    peers(into=path, trl=log(tmp_path, TRL), trl_name="TRL 1.16")
    result = read_result(path)
    assert result.peers == {"verl": {"step_s": 60.0}, "TRL 1.16": {"step_s": 48.1, "peak_gib": 79.0}}
    assert (result.command, result.figures) == ("the first command", {"step_s": 17.0})
    assert result.peers_command == "penstock bench peers --into step.json"
    with pytest.raises(UserError, match="nothing to write to"):
        peers(trl=tmp_path / "peer.log")


def test_logs_without_a_second_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no second step"):
        trl_figures(log(tmp_path, "TRL step {'wall_s': 63.9, 'peak_gib': 78.1}\n"))
    with pytest.raises(UserError, match="no second step"):
        verl_figures(log(tmp_path, VERL_GREPPED.partition("step:2")[0]))
    with pytest.raises(UserError, match="there is no file"):
        verl_figures(tmp_path / "absent.log")


def test_garbled_lines_are_quoted(tmp_path: Path) -> None:
    """As where two processes write at once. The controls are the logs above."""
    with pytest.raises(UserError, match="garbled at '{'wall_s': 48.1, 'peTRL'}'"):
        trl_figures(log(tmp_path, "TRL step {'wall_s': 48.1, 'peTRL'}\n"))
    with pytest.raises(UserError, match="garbled at '{'wall_s'}'"):  # a set, as Python reads it
        trl_figures(log(tmp_path, "TRL step {'wall_s'}\n" * 2 + "TRL step {'wall_s': 48.1, 'peak_gib': 79.0}\n"))
    with pytest.raises(UserError, match="garbled at '{'accuracy_after': 0.9TRL'}'"):
        trl_figures(log(tmp_path, TRL_CPU + "TRL heldout {'accuracy_after': 0.9TRL'}\n"))
    with pytest.raises(UserError, match=r"garbled at '61\.2\.7'"):
        verl_figures(log(tmp_path, "step:2\ntiming_s/step:61.2.7\n"))
