"""Each algorithm by its name takes a short training on the path of all trainings, and held-out reward rises.

The engines start once, with every model that an algorithm may need; between algorithms all trained models, and the
rollout engine with them, go back to the same checkpoint. An algorithm's iterations are the flow's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from penstock.algorithms.registry import ALGORITHMS
from penstock.checks.memory import estimate_groups
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.build import Build
from penstock.engines.commands.checkpoint import Load, Save
from penstock.engines.groups.hosts import Hosts
from penstock.flows.iteration import iteration
from penstock.session.machines.hosts import Machines
from penstock.session.requests import Rollout
from penstock.session.session import Training, open_session, write_config
from penstock.state.manifest import Progress
from penstock.state.run_folder import new_run_folder
from penstock.tasks.iteration.evaluate import evaluate
from penstock.tasks.start import build_engines, load_prompts, starting_model

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 3
SLOW = ("best_of_n", "pass_at_k", "reinforce", "remax")  # few responses, or all alike, say what to do: twice as many
AT_ONCE = "grpo"  # in `make test`
ONE_OF_EACH = {"ppo", "ippo", "remax", "rft", "dapo"}  # in `make test-slow`, the others in `make test-all`
MARKS = {True: [pytest.mark.slow], False: [pytest.mark.slow, pytest.mark.exhaustive]}
SMALL = (
    "iterations=100000",  # the last one would make a report
    "model.tiny={hidden_size: 96, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 64, max_positions: 64}",
    "data.arithmetic={digits: 2, sft: 8, train: 512, heldout: 64}",
    "sft=null",
    "reward.function=tests.flows.reward_functions:low_digits",
    "rollout={prompts: 32, samples: 4, max_response_tokens: 6, max_sequences: 128, ignore_eos: true}",
    "algorithm.mini_batches=4",
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0}",
    "evaluate={every: 0, temperature: 1.0, evaluators: []}",
    "checkpoint.every=0",
)
KL = "algorithm.kl={place: reward, estimator: k1}"
OWN = {
    "ippo": ('data.agents={column: carries, names: ["0", "1", "2"]}',),
    "reinforce_pp": (KL,),
    "rft": ("algorithm.settings.accept_reward=0.5",),
}


def config_of(name: str, *overrides: str) -> TrainConfig:
    """The quickstart, small, with an algorithm."""
    own = (f"algorithm.name={name}", *OWN.get(name, ()), *overrides)
    return load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *own])


@dataclass
class Engines:
    """Engines that train one algorithm after the other, each from the same start."""

    training: Training
    start: Path
    numbers: Iterator[int] = field(default_factory=lambda: count(0, 10))  # a command's key is used once

    def train(self, config: TrainConfig) -> tuple[float, float]:
        """Train from the start; return held-out reward before and after."""
        session, begin = self.training.session(), next(self.numbers)
        session.config = config
        load = Load(str(self.start), version=begin)
        session.call_all(dict.fromkeys(session.distinct_groups, load), f"{begin}/load")
        with disable_run_logger():
            before = evaluate.fn(self.training, begin, 16_384)["heldout/reward"]
            progress = Progress(iteration=begin, policy_version=begin)
            iterations = ITERATIONS * (2 if config.algorithm.name in SLOW else 1)
            begun: Rollout | None = None
            for number in range(begin + 1, begin + 1 + iterations):
                progress, begun = iteration(self.training, number, progress, begun)
            return before, evaluate.fn(self.training, number, 16_384)["heldout/reward"]


@pytest.fixture(scope="module")
def engines(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines with actor, critics, reference and rollout."""
    folder = tmp_path_factory.mktemp("every-algorithm")
    config, run = config_of("ppo", KL), new_run_folder(folder, "run")
    write_config(run, config)
    memory = estimate_groups(config)
    with (
        pytest.MonkeyPatch.context() as patch,
        Hosts(run.logs) as hosts,
        open_session(config, run, memory, Machines(hosts)) as training,
        disable_run_logger(),
    ):
        patch.chdir(ROOT)
        model = starting_model.fn(training)
        load_prompts.fn(training, model)
        build_engines.fn(training, model)
        session = training.session()
        agents = Build(config_of("ippo").model_dump(mode="json"), model, ("critic",))  # beside that of ppo
        session.call_all(dict.fromkeys(session.distinct_groups, agents), "0/agents")
        (folder / "start").mkdir()
        session.call_all(dict.fromkeys(session.distinct_groups, Save(str(folder / "start"))), "start/save")
        yield Engines(training, folder / "start")


@pytest.mark.parametrize(
    "name",
    [name if name == AT_ONCE else pytest.param(name, marks=MARKS[name in ONE_OF_EACH]) for name in ALGORITHMS],
)
def test_it_improves_held_out_reward(name: str, engines: Engines) -> None:
    """By far more than what chance does (see the control): 64 responses of a spread of about 0.1 each."""
    before, after = engines.train(config_of(name))
    assert after > before + 0.1


def test_one_of_the_users_own_improves_it_too(engines: Engines) -> None:
    """Estimator and loss are in no package: flow and ranks import them by name, with the recipe's settings."""
    own = "advantage: tests.own_algorithm:above_median, policy_loss: tests.own_algorithm:bounded"
    settings = "settings: {scale: 2.0, steepness: 0.5}, mini_batches: 4"
    before, after = engines.train(config_of("grpo", f"algorithm={{{own}, {settings}}}"))
    assert after > before + 0.1


def test_without_a_step_nothing_improves(engines: Engines) -> None:
    """The control: the same iterations at a learning rate of 0 leave held-out reward where it was."""
    before, after = engines.train(config_of("grpo", "actor.optimizer.learning_rate=0"))
    assert abs(after - before) < 0.05
