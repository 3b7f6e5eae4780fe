"""A killed training loses nothing: resumed, it ends as one that was left alone, bit for bit.

Real processes are killed with SIGKILL: in the supervised warm-up, between two iterations, and inside one. PPO stands
for what is hardest to bring back (critic, old log-probs, the state of the adaptive KL coefficient, what a sampler
remembers of its prompts), GRPO for the usual case, with a reference that was refreshed just before the kill.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from penstock.cli.runs.sync import sync
from penstock.state.events import read_events
from penstock.state.experience import add_columns, column_names, read_columns
from penstock.state.manifest import Manifest, read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.mlflow import connect
from tests.comparing import logged, memory, numbers, weights
from tests.delivering import answers, begun, mlflow_server, tracked_run
from tests.flows.reward_functions import HOLD
from tests.processes import alive, words_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for four trainings

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 5
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 256, train: 40, heldout: 16}",  # five iterations take each prompt once
    "sft.steps=10",
    "sft.batch=32",
    "sft.checkpoint_every=4",
    "reward.function=tests.flows.reward_functions:low_digit",
    "reward.timeout_s=120",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32, temperature: {0: 1.0, 4: 0.9}}",
    "evaluate={every: 2, temperature: 1.0}",
    "checkpoint.every=2",
    "record.samples_every=2",
)
PPO = (
    "algorithm={name: ppo, mini_batches: 2}",
    "data.sampler={name: adaptive, half_life: 5}",
    "algorithm.kl={place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}",
)
GRPO = ("algorithm={name: grpo, mini_batches: 1, kl: {place: loss, coefficient: 0.05, refresh_every: 2}}",)
WAIT_S = 400.0  # for what takes seconds on a quiet machine


IN_TURN = """
import json, sys
from penstock.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["penstock", *arguments]
    main()
"""


# The command line, killed when steps of the warm-up are recorded and not yet in a checkpoint.
DIES_IN_WARM_UP = """
import os, signal, sys
from penstock.flows import sft
from penstock.cli.main import main

record = sft.record_warm_up

def dying(training, first, losses):
    record(training, first, losses)
    if first == 4:
        training.session().checkpoints.wait()  # for that of step 4, which is written meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

sft.record_warm_up = dying
sys.argv = ["penstock", *sys.argv[1:]]
main()
"""


@dataclass(frozen=True)
class Trainings:
    """Starts trainings in a folder as a person does."""

    folder: Path
    environment: dict[str, str]

    def start(self, name: str, *command: str, hold: str = "") -> subprocess.Popen[bytes]:
        """Start Python with its output in a file; scoring waits while the file `hold` of the run exists."""
        environment = self.environment | ({HOLD: str(self.folder / name / hold)} if hold else {})
        with (self.folder / f"{name}.txt").open("ab") as output:
            return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=output)

    def new(self, name: str, *overrides: str) -> list[str]:
        """Return the command line of a new training in the run folder `name`."""
        recipe = ROOT / "configs" / "quickstart.yaml"
        return ["train", str(recipe), *SMALL, *overrides, "--run", str(self.folder / name)]

    def alone(self, overrides: dict[str, tuple[str, ...]]) -> dict[str, RunFolder]:
        """Run trainings that nobody disturbs, one after the other in one process, which saves its imports."""
        commands = [self.new(name, *changes) for name, changes in overrides.items()]
        self.finish("alone", self.start("alone", "-c", IN_TURN, json.dumps(commands)))
        return {name: RunFolder(self.folder / name) for name in overrides}

    def killed(self, run: RunFolder, *command: str, when: Callable[[RunFolder], bool], hold: str = "") -> RunFolder:
        """Run a command and kill it as soon as `when` holds; all that it started must be gone within 5 s."""
        name = run.name
        process = self.start(name, "-m", "penstock.cli.main", *command, hold=hold)
        until(lambda: when(run) or process.poll() is not None, WAIT_S, f"the moment to kill {name}", 0.01)
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("penstock.engines.groups.rank" in words_of(child) for child in started)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL, self.output(name)
        until(lambda: not any(alive(child) for child in started), 5, f"ranks and workers of {name} are gone")
        return run

    def resume(self, run: RunFolder) -> None:
        """Resume a training and wait for its end."""
        self.finish(run.name, self.start(run.name, "-m", "penstock.cli.main", *self.resumed(run)))

    def resumed(self, run: RunFolder) -> list[str]:
        """Return the command line that resumes a training."""
        return ["train", "--resume", str(run.path)]

    def finish(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a process that must succeed."""
        assert self.end(name, process) == 0, self.output(name)

    def end(self, name: str, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; return how it ended."""
        until(lambda: process.poll() is not None, WAIT_S, f"the end of {name}")
        return process.wait()

    def output(self, name: str) -> str:
        """Return what the processes of that name printed."""
        return (self.folder / f"{name}.txt").read_text(encoding="utf-8")


def iteration_of(run: RunFolder) -> int:
    """Return the iteration that the manifest stands at, -1 before there is one."""
    return read_manifest(run).progress.iteration if run.manifest.is_file() else -1


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    """One Prefect server and one MLflow store for all trainings."""
    folder = tmp_path_factory.mktemp("resume")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_TRACKING_URI": uri,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.txt").open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        begun(uri, "first", "penstock")
        until(lambda: answers(f"{api}/health"), 120, "the server answers")
        yield Trainings(folder, environment)
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
        server.wait(10)


@dataclass(frozen=True)
class Killed:
    """A training that was killed and resumed, and what the kill had left of it."""

    run: RunFolder
    manifest: Manifest
    recorded: list[int]


@pytest.fixture(scope="module")
def undisturbed(trainings: Trainings) -> dict[str, RunFolder]:
    """The same trainings undisturbed."""
    return trainings.alone({"ppo": PPO, "grpo": GRPO})


def inside_an_iteration(trainings: Trainings) -> Killed:
    """Kill PPO in iteration 4, its experience written and its rewards not; there is a checkpoint of iteration 2.

    Parts are left as if it had come while they were written, and one that a restart of the machine has emptied.
    """
    experience = "experience/000004.parquet"
    run = RunFolder(trainings.folder / "ppo-killed")
    new = trainings.new(run.name, *PPO)
    trainings.killed(run, *new, when=lambda run: (run.path / experience).exists(), hold=experience)
    left = what_is_left(run)
    for number in (2, 3, 4):
        path = run.experience(number)
        add_columns(path, read_columns(path, column_names(path)[-1:]))
    newest = max(path.parent.glob(f".{path.name}.*.part"))
    newest.with_name(newest.name.replace("-", "-0")).write_bytes(b"")  # of another boot
    newest.unlink()
    (run.path / "experience" / ".000004.parquet.1.partial").write_bytes(b"cut off")
    with run.metrics.open("a", encoding="utf-8") as stream:
        stream.write('{"iteration": 4, "metr')
    trainings.resume(run)
    return left


def between_iterations(trainings: Trainings) -> Killed:
    """Kill GRPO in step 8 of its warm-up, and once more when its checkpoint of iteration 2 is complete.

    The second time it is kept alive: the command that waits beside it takes it up again, and nobody else.
    """
    run = RunFolder(trainings.folder / "grpo-killed")
    process = trainings.start(run.name, "-c", DIES_IN_WARM_UP, *trainings.new(run.name, *GRPO))
    assert trainings.end(run.name, process) == -signal.SIGKILL, trainings.output(run.name)
    assert read_manifest(run.finetuning).progress.iteration == 4
    assert [record["iteration"] for record in read_metrics(run.warm_up)] == list(range(1, 9))
    assert iteration_of(run) == 0
    assert not run.model("sft").exists()
    tracked = read_manifest(run).tracked

    process = trainings.start(run.name, "-m", "penstock.cli.main", *trainings.resumed(run), "--keep-alive")
    until(lambda: iteration_of(run) == 2 or process.poll() is not None, WAIT_S, "iteration 2", 0.01)
    (keeper,) = psutil.Process(process.pid).children()
    (flow,) = keeper.children()
    started = flow.children(recursive=True)
    assert any("penstock.engines.groups.rank" in words_of(child) for child in started)
    flow.kill()
    left = what_is_left(run)
    until(lambda: not any(alive(child) for child in started), 5, "ranks and workers are gone")
    assert left.manifest.tracked == tracked
    assert not run.finetuning.path.exists()
    trainings.finish(run.name, process)
    return left


def what_is_left(run: RunFolder) -> Killed:
    """Look at a training right after it was killed."""
    return Killed(run, read_manifest(run), [record["iteration"] for record in read_metrics(run)])


@pytest.fixture(scope="module")
def killed_of(trainings: Trainings) -> Callable[[str], Killed]:
    """The training of an algorithm that was killed and went on, made once."""
    kill = {"ppo": inside_an_iteration, "grpo": between_iterations}
    return functools.cache(lambda name: kill[name](trainings))


@pytest.mark.parametrize("name", ["ppo", pytest.param("grpo", marks=pytest.mark.exhaustive)])
def test_a_killed_training_ends_as_one_left_alone(
    trainings: Trainings, undisturbed: dict[str, RunFolder], killed_of: Callable[[str], Killed], name: str
) -> None:
    """Weights and figures are equal to the last bit, and every iteration is in the run folder and in MLflow once."""
    killed, alone = killed_of(name), undisturbed[name]
    assert killed.manifest.progress.iteration == 2
    assert killed.recorded in ([[0, 1, 2, 3]] if name == "ppo" else [[0, 1, 2], [0, 1, 2, 3]])

    assert numbers(killed.run) == numbers(alone)
    assert read_metrics(killed.run.warm_up) == read_metrics(alone.warm_up)
    assert weights(killed.run) == weights(alone)
    ends = [replace(read_manifest(run).progress, seconds=0.0) for run in (killed.run, alone)]
    assert ends[0] == ends[1]
    assert memory(killed.run) == memory(alone)
    assert ends[0].iteration == ITERATIONS
    assert not [*killed.run.path.rglob("*.partial"), *killed.run.path.rglob("*.part")]
    for number in range(1, ITERATIONS + 1):
        assert column_names(killed.run.experience(number)) == column_names(alone.experience(number))

    run_id = tracked_run(killed.run)
    assert read_manifest(killed.run).tracked == killed.manifest.tracked
    client = connect(trainings.environment["MLFLOW_TRACKING_URI"])
    assert client.get_run(run_id).info.status == "FINISHED"
    every = {"iteration": [0, 1, 2, 3, 4, 5], "reward/mean": [1, 2, 3, 4, 5], "checkpoint/gib": [2, 4, 5]}
    every["warm_up/loss"] = list(range(1, 11))
    for metric, steps in every.items():
        assert [entry.step for entry in client.get_metric_history(run_id, metric)] == steps


@pytest.mark.exhaustive
def test_a_killed_training_whose_states_live_in_files_ends_as_one_whose_states_live_in_memory(
    trainings: Trainings, tmp_path: Path
) -> None:
    """Weights and figures to the last bit, warm-up included, and nothing is left in the folder when it is killed.

    Controls: its ranks did map files there; with another seed the weights are others.
    """
    places = [f"{section}.{key}" for section in ("actor", "sft") for key in ("zero_stage=3", "offload=all")]
    folders = [f"{section}.offload_folder={tmp_path}" for section in ("actor", "sft")]
    alone = trainings.alone({"in-memory": (*GRPO, *places), "another-in-memory": (*GRPO, *places, "seed=1")})
    run, mapped = RunFolder(trainings.folder / "in-files"), []

    def saved(run: RunFolder) -> bool:
        mapped.extend(maps for maps in Path("/proc").glob("[0-9]*/maps") if not mapped and maps_files(maps, tmp_path))
        return iteration_of(run) == 2

    trainings.killed(run, *trainings.new(run.name, *GRPO, *places, *folders), when=saved)
    assert mapped and list(tmp_path.iterdir()) == []
    trainings.resume(run)
    assert numbers(run) == numbers(alone["in-memory"])
    assert weights(run) == weights(alone["in-memory"]) != weights(alone["another-in-memory"])
    assert list(tmp_path.iterdir()) == []


def maps_files(maps: Path, folder: Path) -> bool:
    """Whether a process, of which this is the table of mappings, maps a file that a folder has had."""
    with contextlib.suppress(OSError):  # it has ended
        return f"{folder}/" in maps.read_text(encoding="utf-8")
    return False


@pytest.mark.exhaustive
def test_a_training_that_is_kept_alive_goes_on_by_itself(
    trainings: Trainings, killed_of: Callable[[str], Killed]
) -> None:
    """The command that waits beside it says what happened. Control: of one that a person resumed there is nothing."""
    kept, resumed = killed_of("grpo").run, killed_of("ppo").run
    said = "ended by signal 9 (SIGKILL); it is started again"
    assert " ".join(trainings.output(kept.name).split()).count(said) == 1
    assert [event["event"] for event in read_events(kept)] == ["FlowLost", "recovered"]
    assert said not in " ".join(trainings.output(resumed.name).split())
    assert read_events(resumed) == []


@pytest.fixture(scope="module")
def earlier(trainings: Trainings, undisturbed: dict[str, RunFolder]) -> tuple[RunFolder, RunFolder, RunFolder]:
    """Copies of ended trainings that went on from an earlier checkpoint, one after the other in one process.

    The first since its newest is damaged, and its manifest; the others since a person chose it, the last one on two
    ranks at another stage.
    """
    damaged, chosen, moved = (
        copied(undisturbed[name], f"{name}-{end}")
        for name, end in (("grpo", "damaged"), ("ppo", "from"), ("ppo", "moved"))
    )
    for path in (damaged.manifest, max(damaged.checkpoint(ITERATIONS).glob("state-*.safetensors"))):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    groups = "groups={main: {roles: [actor, critic, reference, rollout], ranks: 2}}"
    before = ("--from", str(ITERATIONS - 1))
    commands = [
        trainings.resumed(damaged),
        [*trainings.resumed(chosen), *before],
        [*trainings.resumed(moved), *before, groups, "actor.zero_stage=3"],
    ]
    trainings.finish("earlier", trainings.start("earlier", "-c", IN_TURN, json.dumps(commands)))
    return damaged, chosen, moved


def test_from_an_earlier_checkpoint_a_run_ends_as_it_did(
    trainings: Trainings, undisturbed: dict[str, RunFolder], earlier: tuple[RunFolder, RunFolder, RunFolder]
) -> None:
    """What came after it is taken back, and made alike; what is damaged is named and kept."""
    damaged, chosen, _ = earlier
    said = " ".join(trainings.output("earlier").split())
    aside = damaged.checkpoints / f"damaged-{ITERATIONS:06d}"
    for part in ("manifest.json is damaged", ".safetensors is damaged", str(aside)):
        assert part in said
    assert aside.is_dir()
    for run, name in ((damaged, "grpo"), (chosen, "ppo")):
        assert f"{run.path} goes on from checkpoint {ITERATIONS - 1:06d}" in said
        alone = undisturbed[name]
        assert numbers(run) == numbers(alone)
        assert weights(run) == weights(alone)
        assert memory(run) == memory(alone)
        assert run.model("final").stat().st_mtime > run.checkpoint(ITERATIONS - 1).stat().st_mtime
        assert iteration_of(run) == ITERATIONS


def test_on_two_ranks_at_stage_3_a_run_goes_on_as_on_one_at_stage_1(
    undisturbed: dict[str, RunFolder], earlier: tuple[RunFolder, RunFolder, RunFolder]
) -> None:
    """With a critic and the responses that are there: the same figures, but for the order of sums.

    So it is also the control: the comparison by bits can tell two trainings apart that are as near as that.
    """
    alone, (_, _, moved) = undisturbed["ppo"], earlier
    assert iteration_of(moved) == ITERATIONS
    last, wanted = (read_metrics(run)[-1]["metrics"] for run in (moved, alone))
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean"):
        assert last[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5)
    assert weights(moved) != weights(alone)
    assert numbers(moved) != numbers(alone)


def copied(run: RunFolder, name: str) -> RunFolder:
    """Return a copy of a run beside it."""
    return RunFolder(Path(shutil.copytree(run.path, run.path.with_name(name))))


def test_the_trainings_have_a_state_to_lose(undisturbed: dict[str, RunFolder]) -> None:
    """The other control: critic, old and reference log-probs, an adaptive coefficient that moves, real updates, and
    a sampler with a memory of every iteration.
    """
    run = undisturbed["ppo"]
    columns = set(column_names(run.experience(ITERATIONS)))
    assert {"logprobs_old", "logprobs_reference", "values", "advantages", "returns"} <= columns
    assert len(memory(run).splitlines()) == ITERATIONS
    records = [metrics for _, metrics in numbers(run)[1:]]
    assert len({record["kl/coefficient"] for record in records}) == ITERATIONS
    for name in ("actor/grad_norm", "critic/grad_norm", "actor/kl"):
        assert records[-1][name] > 0
    run = undisturbed["grpo"]
    divergences = [metrics["actor/kl"] for _, metrics in numbers(run)[1:]]
    assert [value > 0 for value in divergences] == [False, True, False, True, False]  # refreshed after 2 and 4
    assert not any(divergences[::2])
    with safe_open(run.checkpoint(ITERATIONS) / "state-main-0.safetensors", framework="np") as image:
        assert any(name.startswith("reference/") for name in image.keys())  # noqa: SIM118 - it is no mapping


def test_a_training_goes_on_when_its_mlflow_server_is_killed(
    trainings: Trainings, undisturbed: dict[str, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as one left alone, and says what MLflow lacks; delivered later, MLflow holds what it holds of the other.

    A second delivery changes nothing.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri, run = f"http://127.0.0.1:{port}", RunFolder(trainings.folder / "away")
    away = Trainings(trainings.folder, trainings.environment | {"MLFLOW_TRACKING_URI": uri})
    with mlflow_server(tmp_path, port):
        process = away.start(run.name, "-m", "penstock.cli.main", *away.new(run.name, *GRPO))
        until(lambda: iteration_of(run) == 2 or process.poll() is not None, WAIT_S, "iteration 2", 0.01)
    away.finish(run.name, process)
    assert f"penstock sync {run.path}" in " ".join(away.output(run.name).split())
    assert weights(run) == weights(undisturbed["grpo"])
    with mlflow_server(tmp_path, port):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        for said in ("now holds all of it", "held all of it already"):
            assert sync(run.path).endswith(said)
            held = logged(uri, run)
            assert held == logged(trainings.environment["MLFLOW_TRACKING_URI"], undisturbed["grpo"])
            assert held[-1] == "FINISHED"
