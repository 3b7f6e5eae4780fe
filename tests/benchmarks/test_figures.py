"""Figures of what a run recorded: medians of steady iterations without evaluation, overhead as what no task used."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks import scaling
from penstock.benchmarks.nccl import LOOKS_LIKE_PCIE, verdict
from penstock.benchmarks.reporting.chart import REST, STAGES, WHOLE, parts, plot, step_figure
from penstock.benchmarks.reporting.result import BenchResult, new_result, write_result
from penstock.benchmarks.reporting.table import result_table, shown
from penstock.benchmarks.reshard import OF_TRAININGS, devices_for, missing_devices, overrides_of
from penstock.benchmarks.scaling import efficiency, parse_counts, placement
from penstock.benchmarks.session import describe
from penstock.benchmarks.step import figures_of, whole_figures
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.links import MIB, bus_bandwidth
from penstock.engines.groups.placement import place, reshard_strategy
from penstock.reports.plots import save


def iteration(seconds: float, **more: float) -> dict[str, float]:
    row = {"time/iteration_s": seconds, "time/rollout_s": 2.0, "time/reward_s": 0.5, "time/advantage_s": 0.25}
    row |= {"time/update_actor_s": 4.0, "actor/update_s": 3.75, "time/reshard_s": 0.125}
    row |= {"time/other_s": 0.125, "rollout/tokens": 70.0, "rollout/tokens_per_s": 35.0}
    return row | {name.replace("__", "/"): value for name, value in more.items()}


def test_step_figures_are_medians_of_steady_iterations_without_evaluation() -> None:
    rows = [iteration(60.0, memory__gpu_gib=90.0), iteration(7.0, memory__gpu_gib=80.0), iteration(7.5)]
    rows.append(iteration(13.0, time__evaluate_s=6.0))
    figures = figures_of(rows, 1, 2)
    assert figures["step_s"] == 7.0
    assert figures["overhead_s"] == pytest.approx(0.125)
    assert figures["update_s"] == 3.75  # what it took itself: no wait for another update
    assert figures["response_tokens_per_s_per_gpu"] == 5.0
    assert figures["peak_gib"] == 90.0  # of all iterations, the cold one too
    assert "mfu" not in figures
    assert figures_of(rows, 0, 2)["step_s"] == 7.25  # the control: the cold one moves it


def test_a_training_as_a_whole_has_the_figures_of_its_summary() -> None:
    """Under the names that its peers' have. Control: what a summary lacks, or has nothing to say of, is no figure."""
    summary = {"accuracy_before": 0.5, "accuracy_after": 0.9, "greedy_after": 0.8, "host_peak_gib": 1.5}
    assert whole_figures(summary) == {"host_peak_gib": 1.5, "accuracy_heldout": 0.9, "accuracy_greedy": 0.8}
    assert whole_figures({"accuracy_before": 0.5, "accuracy_after": None}) == {}


def test_scaling_compares_throughput_per_gpu_with_the_smallest_count() -> None:
    assert efficiency({1: 100.0, 2: 95.0, 4: 80.0}) == {1: 1.0, 2: 0.95, 4: 0.8}
    config = TrainConfig.model_validate({"rollout": {"prompts": 6}})
    assert placement(config, 3)[0] == "rollout.prompts=18"


def test_a_result_on_one_gpu_is_the_recipes_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for the run on one GPU; another recipe's would make the efficiency a comparison of two works."""
    recipe, one = tmp_path / "recipe.yaml", tmp_path / "one.json"
    recipe.write_text("rollout: {prompts: 6}", encoding="utf-8")
    figures = {"response_tokens_per_s_per_gpu": 100.0}
    write_result(one, new_result("step", "command", figures, settings=describe(load_config(recipe))))
    monkeypatch.setattr(
        "penstock.benchmarks.scaling._run", lambda arguments, count: _answer(Path(arguments[-1]), count)
    )
    result = scaling.measure(recipe, [], "command", counts=[1, 4], what="step", skip=0, one=one)
    assert [row["gpus"] for row in result.details] == [1, 4]
    assert [row.get("attention") for row in result.details] == [None, "FlashAttention 4"]
    assert result.figures == {"scaling_efficiency": 0.9, "scaling_efficiency_4": 0.9}
    for overrides, what, message in ((["actor.zero_stage=2"], "step", "'actor' differs"), ([], "update", "of 'step'")):
        with pytest.raises(UserError, match=message):
            scaling.measure(recipe, overrides, "command", counts=[4], what=what, skip=0, one=one)


def _answer(path: Path, count: int) -> None:
    assert count == 4, "one GPU was measured again"
    settings = {"attention": "FlashAttention 4"}
    write_result(path, new_result("step", "command", {"response_tokens_per_s_per_gpu": 90.0}, settings=settings))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"machine": "8 x NVIDIA H200"}, None),  # the control: another number of the same kind
        ({"machine": "1 x NVIDIA H100"}, "NVIDIA H100 at abcdef012, here NVIDIA H200 at abcdef012"),
        ({"commit": "0123456789abc"}, "NVIDIA H200 at 012345678, here NVIDIA H200 at abcdef012"),
        ({"commit": None}, "NVIDIA H200 at no commit"),
    ],
)
def test_a_result_on_one_gpu_is_of_this_kind_and_this_commit(
    changed: dict[str, str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the efficiency would be that of two GPUs, or of two builds."""
    recipe, one = tmp_path / "recipe.yaml", tmp_path / "one.json"
    recipe.write_text("rollout: {prompts: 6}", encoding="utf-8")
    figures = {"response_tokens_per_s_per_gpu": 100.0}
    here = {"machine": "1 x NVIDIA H200", "commit": "abcdef0123456"}
    result = new_result("step", "command", figures, settings=describe(load_config(recipe)))
    write_result(one, result.model_copy(update=here | changed))
    monkeypatch.setattr(
        "penstock.benchmarks.scaling._run", lambda arguments, count: _answer(Path(arguments[-1]), count)
    )
    monkeypatch.setattr("penstock.benchmarks.scaling.machine", lambda: "4 x NVIDIA H200")
    monkeypatch.setattr("penstock.benchmarks.scaling.commit", lambda: here["commit"])
    with pytest.raises(UserError, match=message) if message else nullcontext():
        scaling.measure(recipe, [], "command", counts=[4], what="step", skip=0, one=one)


def test_counts_of_gpus_are_a_rising_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.benchmarks.scaling.visible_gpus", lambda: [0, 1, 2, 3])
    assert parse_counts(None) == [1, 2, 4]
    assert parse_counts("4,1") == [1, 4]
    for wrong in ("8", "1,x", "0", "1,,2"):
        with pytest.raises(UserError, match="--gpus"):
            parse_counts(wrong)


@pytest.mark.parametrize("strategy", OF_TRAININGS)
def test_every_strategy_is_placed_so_that_the_reshard_takes_it(strategy: str, tmp_path: Path) -> None:
    """Over a recipe that places something else; every device that the strategy can use is used, none twice."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "actor: {zero_stage: 1}\nalgorithm: {kl: {place: loss}}\n"
        "groups: {main: {gpus: [0], roles: [actor, rollout]}, other: {gpus: [1], roles: [reference]}}",
        encoding="utf-8",
    )
    for devices in (2, 3, 4):
        overrides = overrides_of(strategy, load_config(recipe), devices, on_gpus=True)
        config = load_config(recipe, overrides)
        assert reshard_strategy(config) == strategy
        used = sum(len(spec.devices) for spec in place(config, devices, tmp_path))
        assert used == (2 if (strategy, devices) == ("local", 3) else devices)
        assert missing_devices(strategy, devices) is None


def test_strategies_are_placed_on_all_gpus_or_on_the_ranks_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of eight GPUs can so be rehearsed on CPU. Control: a recipe that names none gets two."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("groups: {main: {ranks: 8, roles: [actor, rollout]}}", encoding="utf-8")
    monkeypatch.setattr("penstock.benchmarks.reshard.visible_gpus", list)
    monkeypatch.setattr("penstock.benchmarks.session.visible_gpus", list)
    assert devices_for(load_config(recipe)) == 8
    recipe.write_text("{}", encoding="utf-8")
    assert devices_for(load_config(recipe)) == 2
    monkeypatch.setattr("penstock.benchmarks.reshard.visible_gpus", lambda: [0, 1, 2, 3])
    assert devices_for(load_config(recipe)) == 4


def test_strategies_that_lack_devices_say_so() -> None:
    assert missing_devices("shared", 1) is None
    assert missing_devices("broadcast", 1) == "broadcast takes two devices or more, this machine has 1"
    with pytest.raises(UserError, match="no reshard strategy 'magic'"):
        missing_devices("magic", 8)


def test_bus_bandwidth_counts_the_busiest_link() -> None:
    """nccl-tests' factors on four ranks: 3/4, 1 and 6/4 of the bytes per second."""
    found = [bus_bandwidth(name, 400, 2.0, 4) for name in ("all_gather", "broadcast", "all_reduce")]
    assert found == [150.0, 200.0, 300.0]


def gathers(*rates: float) -> list[dict[str, object]]:
    rows = [{"collective": "all_gather", "bytes": 4**i * MIB, "bus_gb_per_s": rate} for i, rate in enumerate(rates)]
    return [*rows, {"collective": "broadcast", "bytes": MIB, "bus_gb_per_s": 9999.0}]


def test_the_verdict_names_the_share_of_the_link_and_the_bucket() -> None:
    text = verdict(gathers(50.0, 200.0, 330.0, 350.0), 450.0)
    assert text == "all-gather reaches 78% of NVLink's 450 GB/s from 16 MiB on: larger buckets gain nothing"
    rising = verdict(gathers(50.0, 200.0, 250.0, 350.0), 450.0)
    assert rising.endswith("with 64 MiB, the largest measured: larger buckets may gain more")
    assert "PCIe" in verdict(gathers(20.0, 450 * LOOKS_LIKE_PCIE - 1), 450.0)
    assert "PCIe" not in verdict(gathers(20.0, 450 * LOOKS_LIKE_PCIE + 1), 450.0)
    assert "the link's rate is not known" in verdict(gathers(1.0, 2.0), None)


def ours(**figures: float) -> BenchResult:
    peers = {"trl": {"step_s": 30.0, "peak_gib": 40.0}, "verl": {"step_s": 20.0, "rollout_s": 12.0}}
    return BenchResult(bench="step", command="c", commit=None, machine="CPU", versions={}, figures=figures, peers=peers)


def test_the_table_has_our_figures_the_peers_and_the_gain() -> None:
    """Half the time and twice the rate are both a gain of 2; figures that one side lacks stay empty."""
    table = result_table(ours(step_s=10.0, mfu=0.5))
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["figure"] == ["step_s", "mfu", "peak_gib", "rollout_s"]
    assert cells["Penstock"] == ["10.00 s", "50.0%", "", ""]
    assert cells["verl"] == ["20.00 s", "", "", "12.00 s"]
    assert [list(column.cells)[0] for column in table.columns if column.header == "gain"] == ["3.00 x", "2.00 x"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reshard_s", 0.0041, "4.10 ms"),
        ("rollout_tokens_per_s", 64013.7, "64,014 tok/s"),
        ("all_gather_gb_per_s", 351.26, "351.3 GB/s"),
        ("reshard_bytes", 0.0, "0 B"),
        ("reshard_bytes", 3.0 * MIB, "3.0 MiB"),
        ("loss", -1.8626e-09, "-1.8626e-09"),
    ],
)
def test_figures_are_shown_with_their_unit(name: str, value: float, text: str) -> None:
    assert shown(name, value) == text


def test_a_step_divides_into_stages_and_a_rest(tmp_path: Path) -> None:
    assert parts({"step_s": 10.0, "rollout_s": 4.0, "update_s": 5.0}) == {
        "rollout": 4.0,
        "actor update": 5.0,
        REST: 1.0,
    }
    assert parts({"step_s": 48.0}) == {WHOLE: 48.0}
    (tmp_path / "step").mkdir()
    write_result(tmp_path / "step" / "step.json", ours(step_s=10.0, rollout_s=4.0))
    assert plot(tmp_path, None) == [tmp_path / "step" / "step.svg"]
    assert plot(tmp_path, tmp_path / "pictures") == [tmp_path / "pictures" / "step.svg"]
    assert "verl" in (tmp_path / "pictures" / "step.svg").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="no result of"):
        plot(tmp_path / "pictures", tmp_path)


@pytest.mark.filterwarnings("error")
def test_a_system_alone_leaves_its_legend_room(tmp_path: Path) -> None:
    """Eight stages in the legend beside a single bar: matplotlib warns where its layout has no room for the axes."""
    figures = {"step_s": 30.0, **dict.fromkeys(STAGES, 3.0)}
    result = ours(**figures).model_copy(update={"peers": {}})
    assert save(step_figure, result, tmp_path / "step.svg") == tmp_path / "step.svg"
