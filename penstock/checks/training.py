"""Checks before anything starts: every mistake that can be seen without an engine ends the run here, in one message.

In the order of what is cheapest to see and what later checks need: model folder, data, reward, devices, memory.
Nothing is written, no engine is started, torch is not imported.
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.checks.data import check_agents, check_pairs, check_prompt_selection, check_prompts
from penstock.checks.dataflow import load_dataflow
from penstock.checks.memory import GroupEstimate, check_memory
from penstock.checks.model.adapters import check_targets
from penstock.checks.model.attention import check_head_size
from penstock.checks.model.chat import check_chat
from penstock.checks.model.folder import check_model_folder
from penstock.checks.model.fp8 import check_fp8
from penstock.checks.model.longest_row import check_longest_row
from penstock.checks.model.mixtures import check_corrections, check_router_loss, check_routing
from penstock.checks.model.own_code import check_served_code
from penstock.checks.model.starting_model import check_model
from penstock.checks.prompts import check_prompt_lengths, read_prompts
from penstock.checks.registered import check_registering
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.reward import REWARD_SOURCES
from penstock.configs.sections.run import names_of_trackers
from penstock.data.source import reading_once
from penstock.engines.families.served import check_served
from penstock.engines.families.shape import read_settings, weight_shapes
from penstock.environments.loading import asks_policy, ends_turns_at, tools_told
from penstock.evaluators.loading import load_evaluators
from penstock.rewards.source import check_source
from penstock.trackers.table import check_trackers
from penstock.usercode.sandbox import check_sandbox


def check_training(config: TrainConfig) -> list[GroupEstimate]:
    """Check everything that `train` needs; return the placement with memory estimates.

    Raises:
        UserError: the first mistake found.
    """
    check_inputs(config)
    return check_memory(config)


@reading_once()
def check_inputs(config: TrainConfig) -> None:
    """Check all that does not depend on what else runs on this machine: model, data, reward, evaluators.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config)
    check_fp8(config)
    check_trackers(names_of_trackers(config.record.tracker))
    check_registering(config)
    check_rollout_model(config)
    if config.critic is not None and config.critic.path is not None:
        check_model_folder(Path(config.critic.path), "critic.path", code=config.model.code)
    check_targets(config)
    check_router_loss(config)
    check_routing(config)
    frames = read_prompts(config)
    columns = check_prompts(config, frames)
    check_agents(config, frames["train"])
    if config.data.chat:
        check_chat(config)
    if config.sft is not None:
        check_pairs(config)
    check_environment(config)
    check_reward(config, columns)
    check_prompt_selection(config)
    if config.dataflow is not None:
        load_dataflow(config)
    load_evaluators(config.evaluate.evaluators or ())
    check_prompt_lengths(config, frames)


def check_rollout_model(config: TrainConfig) -> None:
    """Check that the rollout engine serves the actor, with the weights that are trained.

    Raises:
        UserError: it does not (see `check_head_size`, `check_longest_row` and `penstock.engines.families.served`).
    """
    if config.model.path is not None:
        folder = Path(config.model.path)
        settings = read_settings(folder)
        check_served(settings, weight_shapes(folder), f"model.path: {folder}")
        check_longest_row(config, settings)
        check_corrections(config, settings)
        check_served_code(folder, config.model.code)
    check_head_size(config)


def check_environment(config: TrainConfig) -> None:
    """Check that the environment loads, and where its ranks are on this machine that its sandbox can be made.

    Raises:
        UserError: it does not, or cannot.
    """
    if config.environment is None:
        return
    tools_told(config.environment)
    ways = [name for name in ("tail", "carry", "stream") if getattr(config.rollout, name) is not None]
    resamples = config.algorithm.dynamic_sampling is not None and (config.rollout.goes_on or "tail" in ways)
    if resamples and asks_policy(config.environment):
        raise UserError(
            f"'{config.environment.type}' asks the policy for its turns, and it is not known whether a training learns "
            f"the same where algorithm.dynamic_sampling goes on with such episodes of rollout.{ways[0]}",
            f"remove algorithm.dynamic_sampling or rollout.{ways[0]}",
        )
    if config.environment.max_paths > 1 and config.rollout.goes_on:
        raise UserError(
            f"'environment.max_paths' is above 1 with rollout.{ways[0]}: what an episode of several paths has under "
            "way does not outlast its engine, so a resume or a replay would have other episodes",
            "set environment.max_paths=1, or use rollout.tail, or rollout.stream at staleness 0",
        )
    if config.data.image_column is not None and asks_policy(config.environment):
        raise UserError(
            f"'{config.environment.type}' asks the policy by messages of its own, where images of rows have no place",
            "use an environment that answers the policy, or rows without images",
        )
    if config.players and config.data.chat and (stop := ends_turns_at(config.environment)):
        raise UserError(
            f"'{config.environment.type}' ends turns at {', '.join(map(repr, stop))}, and what an agent is shown later "
            "can follow no turn of a chat that did not end with the template's own token",
            "remove 'stop' from the class, or set data.chat=false",
        )
    if config.environment.sandbox is not None and not any(group.hosts for group in config.groups.values()):
        check_sandbox("environment.sandbox")


def check_reward(config: TrainConfig, columns: list[str]) -> None:
    """Check that there is a reward, and that it loads or that its server answers.

    Raises:
        UserError: it does not.
    """
    if config.reward.model is not None:
        check_model_folder(Path(config.reward.model), "reward.model", scores=True, code=config.model.code)
    elif config.reward.kind is not None:
        check_source(config.reward, columns)
    elif config.environment is None:  # whether an environment gives rewards shows in the first batch
        *names, last = [f"'reward.{name}'" for name in REWARD_SOURCES]
        raise UserError(
            f"no reward: none of {', '.join(names)} and {last} is set",
            "add reward.function=module:function, e.g. penstock.rewards.builtin:exact_match",
        )


@reading_once()
def check_supervised(config: TrainConfig) -> None:
    """Check what the `sft` flow alone needs.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config)
    check_trackers(names_of_trackers(config.record.tracker))
    if config.sft is None:
        raise UserError("there is no 'sft' section", "add one, e.g. sft.steps=400")
    check_targets(config, "sft")
    if config.data.chat:
        check_chat(config)
    check_pairs(config)
