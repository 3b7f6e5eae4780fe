"""What the flow itself needs for the replies of many engines: all GPUs wait for it in every iteration.

Ranks without a model answer the prompts with made-up responses of full length, all at the same moment. From there on
everything is a training's own: the channel, the tasks rollout, reward and advantage, the reward function's workers.
`flow_s` is what passes between the ranks' replies and advantages that are in the experience file. It grows with the
engines, whose own work does not: what it adds to a step is lost to scaling, on machines of more GPUs than are there.

Left out: engines of different speed, and all that a GPU does. Rewards are begun ahead as in a training: where there is
a GPU (penstock/session/rollout/score_ahead.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, settings_of
from penstock.checks.model.starting_model import check_model
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from penstock.engines.groups.machine import visible_gpus
from penstock.reports.progress import TrainingProgress
from penstock.session.session import Session, Training, registered
from penstock.state.manifest import Progress
from penstock.state.run_folder import new_run_folder
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.reward import reward
from penstock.tasks.iteration.rollout import begin_rollout, rollout
from penstock.tasks.start import load_prompts, starting_model

FIGURES = {
    "flow_s": "flow_s",
    "rollout_s": "rollout_s",
    "reward_s": "time/reward_s",
    "advantage_s": "time/advantage_s",
}


def measure(config: TrainConfig, command: str, *, counts: Sequence[int], rounds: int, skip: int) -> BenchResult:
    """Answer `rollout.prompts` prompts per engine `rounds` times, for each number of engines; medians after `skip`.

    Raises:
        UserError: the recipe is wrong, or too few rounds are asked for.
    """
    steady(range(rounds), skip)
    if config.model.path is None:
        raise UserError("replying ranks need a model folder, for its tokenizer", "set model.path")
    check_model(config)
    details = [_measured(config, count, rounds, skip) for count in counts]
    figures = {f"{name}_{row['engines']}": row[name] for row in details for name in FIGURES}
    settings = {"rounds": rounds, "skipped": skip, **describe(config)}
    return new_result("replies", command, figures, settings=settings, details=details)


def _measured(config: TrainConfig, engines: int, rounds: int, skip: int) -> dict[str, Any]:
    sized = config.rollout.model_copy(update={"prompts": engines * config.rollout.prompts})
    with _replying(config.model_copy(update={"rollout": sized}), engines) as (training, progress):
        progress.start(rounds)
        rows = []
        for number in range(1, rounds + 1):
            rows.append(_round(training, number))
            progress.advance(number, rows[-1])
    return {"engines": engines, "responses": sized.prompts * sized.samples, **medians(steady(rows, skip), FIGURES)}


def _round(training: Training, number: int) -> Mapping[str, float]:
    settings = settings_of(training.config, number)
    at = Progress(prompt_cursor=(number - 1) * training.config.rollout.prompts)
    stage = reward.fn(training, settings, rollout.fn(training, settings, begin_rollout(training, settings, at)))
    found = advantage.fn(training, settings, stage, []).metrics
    rollout_s = found["time/rollout_s"] - found["rollout/request_s_max"]
    flow_s = rollout_s + found["time/reward_s"] + found["time/advantage_s"]
    return {**found, "rollout_s": rollout_s, "flow_s": flow_s}


@contextmanager
def _replying(config: TrainConfig, engines: int) -> Iterator[tuple[Training, TrainingProgress]]:
    """Open a session whose engines are replying ranks, and the recipe's source of rewards."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, disable_run_logger():
        run = new_run_folder(Path(scratch), "bench")
        session = Session(config, run)
        spec = GroupSpec(
            name="replying",
            roles=("rollout",),
            devices=(RankDevice(0 if visible_gpus() else None),) * engines,
            log_dir=run.logs,
            start_timeout_s=config.engine.start_timeout_s,
            command_timeout_s=config.engine.command_timeout_s,
            heartbeat_timeout_s=config.engine.heartbeat_timeout_s,
            worker="penstock.benchmarks.ranks.replying_rank:ReplyingRank",
        )
        with TrainingProgress() as session.progress, registered(session) as training, session.stack:
            session.say(f"starting {engines} replying ranks")
            session.groups["rollout"] = session.stack.enter_context(EngineGroup(spec))
            load_prompts.fn(training, starting_model.fn(training))
            session.groups["rollout"].wait_ready()
            yield training, session.progress
