"""A training whose ranks or hosts are lost goes on by itself, and ends as one that was left alone, bit for bit.

Real processes are killed, or stopped, at every stage of a training. What has to be equal: weights, figures, tables of
samples, what the sampler remembers, experience, and what MLflow holds. Each loss is an event in the run folder and in
MLflow.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.loading.load import load_config
from penstock.engines.groups import placement
from penstock.engines.groups.group import LostTooOften, RankLost
from penstock.engines.groups.spec import GroupSpec
from penstock.flows.train import train
from penstock.session import session
from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.session.session import AHEAD, Session
from penstock.state.events import read_events
from penstock.state.experience import column_names, origin_of, read_columns
from penstock.state.manifest import Progress, ended, read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.tasks.stream.portion import PORTIONS
from tests.comparing import logged, memory, numbers, weights
from tests.faults.blows import HOST, Blow, blows_falling
from tests.processes import words_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 4
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 256, train: 40, heldout: 16}",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "evaluate={every: 2, temperature: 1.0}",
    "checkpoint.every=2",
    "record.samples_every=1",
    "engine={restarts: 10, heartbeat_timeout_s: 3}",
)
RECIPES = {
    "grpo": (
        "sft.steps=10",
        "sft.batch=32",
        "sft.checkpoint_every=4",
        "algorithm={name: grpo, mini_batches: 2, kl: {place: loss, coefficient: 0.05, refresh_every: 2}, "
        "dynamic_sampling: {max_rollouts: 2}}",
    ),
    "tail": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.tail={extra: 0.5, max_wait: 3}",  # two short rounds, then a long one
        "algorithm.mini_batches=2",
    ),
    "tail with dynamic sampling": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "rollout.tail={extra: 0.5, max_wait: 3}",
        "algorithm={name: grpo, mini_batches: 2, dynamic_sampling: {max_rollouts: 3}}",
    ),
    "tail of ppo": (
        "sft=null",
        "rollout.tail={extra: 0.5, max_wait: 3}",
        "algorithm={name: ppo, mini_batches: 2, "
        "kl: {place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}}",
    ),
    "tail of episodes": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.tail={extra: 0.5, max_wait: 3}",
        "rollout.max_response_tokens=20",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:Calculator, max_turns: 2}",
    ),
    "agent": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "algorithm.mini_batches=2",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:CalculatorAgent, max_turns: 2}",
    ),
    "game": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "data.arithmetic={checked: true, mistakes: 0.4}",
        "data.max_prompt_tokens=32",
        "environment={type: penstock.environments.games.checked_sums:CheckedSums, agents: [solver, checker]}",
        "reward=null",
        "algorithm={name: ippo, mini_batches: 2}",
    ),
    "stream": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "rollout.stream.portions=4",
        "groups={main: {ranks: 1, roles: [actor, reference]}, generating: {ranks: 1, roles: [rollout]}}",
        "algorithm={name: grpo, mini_batches: 1, kl: {place: loss, coefficient: 0.05, refresh_every: 2}}",
        "data.sampler={name: adaptive, half_life: 5}",
    ),
    "stream of episodes": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.stream.portions=4",
        "rollout.max_response_tokens=20",
        "groups={main: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}",
        "algorithm.mini_batches=1",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:Calculator, max_turns: 2}",
    ),
    "stream of a tail": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "rollout.tail={extra: 0.5, max_wait: 3}",
        "rollout.stream.portions=4",
        "algorithm={name: grpo, mini_batches: 1, kl: {place: loss, coefficient: 0.05}}",
    ),
    "stream of a carry": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "rollout.carry={extra: 0.5, staleness: 2}",
        "rollout.stream.portions=4",
        "algorithm={name: grpo, mini_batches: 1}",
    ),
    "carry": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.max_response_tokens=20",
        "rollout.carry={extra: 0.5, staleness: 2}",
        "algorithm={name: grpo, mini_batches: 2, dynamic_sampling: {max_rollouts: 2}}",
    ),
    "carry of ppo": (
        "sft=null",
        "rollout.max_response_tokens=20",
        "rollout.carry={extra: 0.5, staleness: 1}",
        "algorithm={name: ppo, mini_batches: 2, "
        "kl: {place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}}",
    ),
    "carry of lora": (
        "sft=null",
        "rollout.max_response_tokens=20",
        "rollout.carry={extra: 0.5, staleness: 2}",
        "algorithm.correction={proximal: rollout}",
        "actor.lora={rank: 4, alpha: 8}",
    ),
    "carry that puts off": (
        "sft=null",
        "model.tiny.max_positions=128",
        "rollout.max_response_tokens=100",
        "rollout.ignore_eos=true",
        "rollout.carry={extra: 0.5, staleness: 1, max_wait: 2}",
        "algorithm.mini_batches=2",
    ),
    "carry of episodes": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.carry={extra: 0.5, staleness: 2}",
        "rollout.max_response_tokens=20",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:Calculator, max_turns: 2}",
    ),
    "carry of agents": (
        "sft.steps=10",
        "sft.batch=32",
        "rollout.carry={extra: 0.5, staleness: 2}",
        "rollout.max_response_tokens=20",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:CalculatorAgent, max_turns: 2}",
    ),
    "muon": (
        "sft={steps: 10, batch: 32, checkpoint_every: 4, optimizer: {name: sgd, learning_rate: 1e-1}}",
        "algorithm.mini_batches=2",
        "actor={zero_stage: 0, optimizer: {name: muon}}",
    ),
    "adafactor of ppo": (
        "sft=null",
        "algorithm={name: ppo, mini_batches: 2}",
        "actor={zero_stage: 0, optimizer: {name: adafactor, learning_rate: 1e-2}}",
        "critic.optimizer={name: sgd, learning_rate: 1e-2}",
    ),
    "ppo": (
        "sft=null",
        "groups={main: {ranks: 1, roles: [actor, rollout, reference]}, critic: {ranks: 1, roles: [critic]}}",
        "algorithm={name: ppo, mini_batches: 2, "
        "kl: {place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}}",
        "data.sampler={name: adaptive, half_life: 5}",
    ),
}


WORKERS = {"carry that puts off": "tests.faults.uneven_rank:ShortUnevenWorker"}  # of other ranks than the engines' own


@dataclass(frozen=True)
class Struck:
    """A training that is struck, and from where it goes on each time.

    Attributes:
        recipe: which one.
        blows: in the order in which they fall.
        places: what it goes on from.
        marks: of the test.
    """

    recipe: str
    blows: Sequence[Blow]
    places: Sequence[str]
    marks: Sequence[pytest.MarkDecorator] = ()


SILENCE = signal.SIGSTOP
NONE, STEPS, SAVED = "its beginning", "checkpoint 000004", "checkpoint 000002"  # memory ends with its host
STRUCK = {
    "at its start": Struck(
        "grpo",
        [Blow("make_tiny"), Blow("sft_steps", "4/", written=True), Blow("build")],
        [NONE, STEPS, NONE],
        [pytest.mark.exhaustive],
    ),
    "in an iteration": Struck(
        "grpo",
        [
            Blow("generate", "1/rollout"),
            Blow("penstock.tasks.iteration.reward.score", "2"),
            Blow("update_actor", "3/", number=SILENCE),
            Blow("reshard", "4/", times=2),
            Blow("export"),
        ],
        [NONE, *(f"snapshot 00000{number}" for number in (1, 2, 3, 3, 4))],
    ),
    "in its host": Struck(
        "grpo",
        [
            Blow("update_actor", "2/", HOST),
            Blow("penstock.session.session.write_snapshot", "3", HOST),  # after two of the warm-up
            Blow("update_actor", "4/", HOST),
        ],
        [NONE, NONE, SAVED],
        [pytest.mark.exhaustive],  # of the others some end with their host's loss
    ),
    "while prompts wait": Struck(
        "tail",
        [
            Blow("penstock.tasks.iteration.reward.score", "2"),
            Blow("update_actor", "3/"),
            Blow("update_actor", "4/", HOST),
        ],
        ["snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "while refused groups are replaced by what is under way": Struck(
        "tail with dynamic sampling",
        [
            Blow("generate", "1/resample-1"),
            Blow("penstock.tasks.iteration.resample.score", "3"),
            Blow("update_actor", "3/"),
            Blow("update_actor", "4/", HOST),
        ],
        [NONE, "snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "while responses go on": Struck(
        "carry",
        [
            Blow("penstock.tasks.iteration.reward.score", "2"),
            Blow("update_actor", "3/"),
            Blow("update_actor", "4/", HOST),
        ],
        ["snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "while an agent plays": Struck(
        "agent",
        [Blow("generate", "2/rollout"), Blow("update_actor", "3/"), Blow("update_actor", "4/", HOST)],
        ["snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "while a game is played": Struck(
        "game",
        [Blow("generate", "2/rollout"), Blow("update_critic", "3/"), Blow("update_actor", "4/", HOST)],
        ["snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "while the gradient is summed": Struck(
        "stream",
        [
            Blow("sum_gradient", "2/update_actor/1"),
            Blow("generate", "3/rollout", "generating"),
            Blow("step_actor", "3/"),
            Blow("sum_gradient", "4/update_actor/3", HOST),
        ],
        [*(f"snapshot 00000{number}" for number in (1, 2, 2)), SAVED],
        [pytest.mark.exhaustive],
    ),
    "while ranks generate and learn": Struck(
        "stream of a tail",
        [
            Blow("sum_gradient", "2/update_actor/1"),
            Blow("step_actor", "3/"),
            Blow("sum_gradient", "4/update_actor/3", HOST),
        ],
        ["snapshot 000001", "snapshot 000002", SAVED],
        [pytest.mark.exhaustive],
    ),
    "with other optimizers": Struck(
        "muon",
        [Blow("sft_steps", "4/", written=True), Blow("update_actor", "2/"), Blow("update_actor", "4/", HOST)],
        [STEPS, "snapshot 000001", SAVED],
        [pytest.mark.exhaustive],
    ),
    "with a critic of another optimizer": Struck(
        "adafactor of ppo",
        [Blow("update_critic", "2/"), Blow("update_actor", "4/", HOST)],
        ["snapshot 000001", SAVED],
        [pytest.mark.exhaustive],
    ),
    "in a group beside the actor's": Struck(
        "ppo",
        [Blow("update_critic", "2/", "critic"), Blow("update_actor", "3/"), Blow("values", "4/", "critic")],
        [f"snapshot 00000{number}" for number in (1, 2, 3)],
    ),
}


@pytest.fixture(scope="module")
def run_of(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Trains in this process, in a folder of a name."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, recipe: str, *changes: str, blows: Sequence[Blow] = ()) -> RunFolder:
        with pytest.MonkeyPatch.context() as patch, blows_falling(blows):
            patch.chdir(ROOT)
            place_workers(patch, recipe)
            config = load_config(ROOT / "configs" / "careless.yaml", [*SMALL, *RECIPES[recipe], *changes])
            train(config, run_folder=str(folder / name))
        return RunFolder(folder / name)

    return run


def place_workers(patch: pytest.MonkeyPatch, recipe: str) -> None:
    """Let ranks be of the recipe's own worker, if it has one."""
    if recipe in WORKERS:
        patch.setattr(session, "place", partial(placed, worker=WORKERS[recipe]))


def placed(*arguments: Any, worker: str) -> list[GroupSpec]:
    """Return the groups of a training, with ranks of another worker."""
    return [replace(spec, worker=worker) for spec in placement.place(*arguments)]


@pytest.fixture(scope="module")
def undisturbed(run_of: Callable[..., RunFolder]) -> Callable[[str], RunFolder]:
    """The training of a recipe that nobody disturbs, run once."""
    done: dict[str, RunFolder] = {}

    def alone(recipe: str) -> RunFolder:
        if recipe not in done:
            done[recipe] = run_of(f"{recipe}-alone", recipe)
            assert read_events(done[recipe]) == []
        return done[recipe]

    return alone


@pytest.mark.parametrize("where", [pytest.param(where, marks=struck.marks) for where, struck in STRUCK.items()])
def test_a_training_that_is_struck_ends_as_one_left_alone(
    where: str, run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    """It says what was lost, and goes on from where it has to."""
    struck = STRUCK[where]
    run, alone = run_of(where, struck.recipe, blows=struck.blows), undisturbed(struck.recipe)
    assert_equal(run, alone)
    store = os.environ["MLFLOW_TRACKING_URI"]
    assert logged(store, run) == logged(store, alone)
    events = read_events(run)
    hits = [blow for blow in struck.blows for _ in range(blow.times)]
    assert [event["number"] for event in events] == [n for n in range(1, len(hits) + 1) for _ in range(2)]
    for blow, place, lost, recovered in zip(hits, struck.places, events[::2], events[1::2], strict=True):
        assert lost["event"] == ("HostLost" if blow.to == HOST else "RankLost")
        groups = {"main", "generating"} if blow.to == HOST else {blow.to}  # a host is lost by who waits for it first
        assert lost["group"] in groups and lost["rank"] == blow.rank
        assert ("silent" in lost["reason"]) == (blow.number == SILENCE)
        assert (recovered["event"], recovered["place"]) == ("recovered", place)
        assert 0 < recovered["recovered_s"] < 300


def test_a_rank_that_was_in_reserve_trains_on_likewise(
    run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: its libraries are imported in another order, and before its epoch began.

    Control: once the training has recovered no other rank lives than the one that was in reserve.
    """
    ranks, reserve = list[set[int]](), list[set[int]]()

    def kept_everywhere(session: Session) -> None:
        ranks.append(below())
        for group in session.distinct_groups:
            group.keep_reserve(AHEAD)
        until(lambda: below() != ranks[-1], 20, "there is one in reserve")
        reserve.append(below() - ranks[-1])

    def below() -> set[int]:
        found = psutil.Process().children(recursive=True)
        return {process.pid for process in found if "penstock.engines.groups.rank" in words_of(process)}

    monkeypatch.setattr(Session, "keep_reserve", kept_everywhere)
    run = run_of("reserve", "grpo", blows=[Blow("update_actor", "3/")])
    (first, second), (waiting, _) = ranks, reserve
    assert len(first) == len(waiting) == 1
    assert second == waiting
    assert_equal(run, undisturbed("grpo"))
    assert read_events(run)[-1]["place"] == "snapshot 000002"


def assert_equal(run: RunFolder, alone: RunFolder) -> None:
    """Assert that two trainings have the same result, record and history."""
    assert ended(run)
    assert numbers(run) == numbers(alone)
    assert read_metrics(run.warm_up) == read_metrics(alone.warm_up)
    assert weights(run) == weights(alone)
    assert memory(run) == memory(alone)
    assert [progress(one) for one in (run, alone)] == [replace(progress(run), iteration=ITERATIONS)] * 2
    assert not [file for left in ("*.partial", "*.part", "*portion-*") for file in run.path.rglob(left)]
    for number in range(1, ITERATIONS + 1):
        assert run.samples(number).read_bytes() == alone.samples(number).read_bytes()
        files = [one.experience(number) for one in (run, alone)]
        assert column_names(files[0]) == column_names(files[1])
        ids = [read_columns(path, ["sample_id", "response"]) for path in files]
        assert ids[0] == ids[1]
        assert carried(run, number) == carried(alone, number)


def carried(run: RunFolder, number: int) -> list[object]:
    """Return what the rollout of an iteration left unfinished, and which policies sampled its batch, if it says so."""
    found: list[object] = []
    for path, of_all in ((run.carried(number), True), (run.experience(number), False)):
        names = column_names(path) if path.exists() else []
        for name in names if of_all else {POLICY_VERSIONS} & set(names):
            column = read_columns(path, [name])[name]
            parts = (column.values_T, column.offsets_B1) if isinstance(column, Ragged) else (np.asarray(column),)
            found += [(path.name, name, *(repr(part.tolist()) for part in parts))]  # a NaN is not equal to itself
    return found


def resume(run: RunFolder, recipe: str = "") -> None:
    """Resume a training in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        place_workers(patch, recipe)
        train(resume=str(run.path))


def progress(run: RunFolder) -> Progress:
    """Return where a run stands, without what the machine took for it."""
    return replace(read_manifest(run).progress, seconds=0.0)


def test_more_losses_than_allowed_end_the_training_and_a_resume_ends_it_alike(
    run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    """The name of the end says so. Control: the loss before was recovered from."""
    alone = undisturbed("grpo")
    with pytest.raises(LostTooOften, match="of 2 losses within 3600 s engine.restarts allows 1"):
        run_of("too-often", "grpo", "engine.restarts=1", blows=[Blow("update_actor", "3/", times=2)])
    run = RunFolder(alone.path.with_name("too-often"))
    assert [event["event"] for event in read_events(run)] == ["RankLost", "recovered", "RankLost", "given up"]
    assert read_manifest(run).progress.iteration == 2
    resume(run)
    assert_equal(run, alone)


@pytest.mark.parametrize("recipe", [pytest.param("tail of ppo", marks=pytest.mark.exhaustive), "tail of episodes"])
def test_prompts_that_wait_outlast_a_training_that_ends_and_is_resumed(
    recipe: str, run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    """In the update of the round that takes those of two others. Control: prompts did wait, and had their turn."""
    alone = undisturbed(recipe)
    rounds = [record["metrics"] for record in read_metrics(alone)[1:]]
    assert [figures["rollout/deferred"] for figures in rounds] == [4, 8, 0, 4]
    taken = [set(read_columns(alone.experience(number), ["prompt_id"])["prompt_id"]) for number in range(1, 5)]
    assert [len(prompts) for prompts in taken] == [8] * 4
    assert len(set.union(*taken)) == 32
    with pytest.raises(RankLost):
        run_of(f"{recipe}, ended", recipe, "engine.restarts=0", blows=[Blow("update_actor", "3/")])
    run = RunFolder(alone.path.with_name(f"{recipe}, ended"))
    assert len(read_manifest(run).progress.deferred) == 8
    resume(run)
    assert_equal(run, alone)


@pytest.mark.parametrize(
    ("recipe", "staleness"),
    [
        pytest.param("carry of ppo", 1, marks=pytest.mark.exhaustive),
        pytest.param("carry of lora", 2, marks=pytest.mark.exhaustive),
        ("carry that puts off", 1),
        pytest.param("carry of episodes", 2, marks=pytest.mark.exhaustive),
        pytest.param("carry of agents", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_responses_that_go_on_outlast_a_training_that_ends_and_is_resumed(
    recipe: str, staleness: int, run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    """In the update of the third iteration, of responses that the first and the second have begun.

    Control: there are responses of several policies, and none older than it may be.
    """
    alone = undisturbed(recipe)
    columns = [read_columns(alone.experience(number), [POLICY_VERSIONS])[POLICY_VERSIONS] for number in range(1, 5)]
    of_several = [sum(len(set(rows.row(row).tolist())) > 1 for row in range(len(rows))) for rows in columns]
    assert of_several[0] == 0 and sum(of_several) > 3
    ages = [record["metrics"]["rollout/staleness_max"] for record in read_metrics(alone)[1:]]
    assert max(ages) <= staleness
    if "max_wait" in str(RECIPES[recipe]):
        put_off = [record["metrics"]["rollout/put_off"] for record in read_metrics(alone)[1:]]
        assert put_off[0] == 0 < put_off[1]
    with pytest.raises(RankLost):
        run_of(f"{recipe}, ended", recipe, "engine.restarts=0", blows=[Blow("update_actor", "3/")])
    run = RunFolder(alone.path.with_name(f"{recipe}, ended"))
    assert len(read_manifest(run).progress.deferred) == 4
    resume(run, recipe)
    assert_equal(run, alone)


@pytest.mark.parametrize(
    "recipe",
    [
        "stream",
        *(
            pytest.param(f"stream of {what}", marks=pytest.mark.exhaustive)
            for what in ("episodes", "a tail", "a carry")
        ),
    ],
)
def test_a_sum_that_is_cut_off_is_made_again_by_a_resume(
    recipe: str, run_of: Callable[..., RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    """In the middle of the third iteration's, and then before its step, of experience that is whole.

    The second time nothing is generated again, and the portions are the same. Control: there are several of them.
    """
    alone = undisturbed(recipe)
    portions = origin_of(alone.experience(3))[PORTIONS]
    assert sorted(group for portion in portions for group in portion) == list(range(8))
    assert len(portions) == 4
    name = f"{recipe}, ended"
    with pytest.raises(RankLost):
        run_of(name, recipe, "engine.restarts=0", blows=[Blow("sum_gradient", "3/update_actor/1")])
    run = RunFolder(alone.path.with_name(name))
    assert not run.experience(3).exists()
    with pytest.raises(RankLost), blows_falling([Blow("step_actor", "3/")]):
        resume(run)
    assert origin_of(run.experience(3))[PORTIONS] == portions
    resume(run)
    assert "rollout/tokens_per_s" not in read_metrics(run)[3]["metrics"], "of that nothing was generated again"
    assert_equal(run, alone)


def test_a_mistake_is_not_recovered_from(run_of: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other control: it would come again. No engine begins a second epoch."""

    def mistaken(*_: object) -> None:
        raise UserError("the data are wrong", "put them right")

    monkeypatch.setattr("penstock.flows.iteration.forward_passes", mistaken)
    with pytest.raises(UserError, match="the data are wrong"):
        run_of("mistaken", "grpo")
