"""Rollout: the policy answers the iteration's prompts, and the answers become an experience file.

The engines begin before the task does: as soon as the iteration before has nothing left for them, so that they need
not wait for its record, nor for Prefect to end one child flow and begin another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.configs.sections.algorithm import AlgorithmConfig
from penstock.data.agents import agent_numbers, numbers_of_players
from penstock.engines.commands.rollout import CarriedResponses, Sampling
from penstock.session.figures import generation_figures
from penstock.session.requests import BegunGeneration, BegunRollout, GenerationRequest, Rollout, Round
from penstock.session.rollout.carried import (
    CARRIED,
    POLICY_VERSIONS,
    begun_before,
    is_kept,
    keep_carried,
    of_prompts,
    staleness_figures,
)
from penstock.session.rollout.draw import draws_by_rewards
from penstock.session.rollout.ended import EndedFile, keeps_ended, origin_of_ended, other_streams
from penstock.session.rollout.episodes import episode_column_names, episode_figures
from penstock.session.rollout.generation import Responses, begin_generation, images_of, take_responses
from penstock.session.rollout.portions import Portions, StreamedRollout
from penstock.session.rollout.rounds import further_round, next_round, round_figures
from penstock.session.rollout.score_ahead import sample_id, scoring_ahead
from penstock.session.rollout.told import News
from penstock.session.session import Stage, Training, timed
from penstock.session.settings import Settings, next_settings
from penstock.state.deferred import Deferred
from penstock.state.experience import (
    AGENT,
    IMAGES,
    PATH_ENDS,
    RESAMPLED,
    ROUTES,
    ExperienceRef,
    column_names,
    origin_of,
    read_columns,
    write_columns_apart,
)
from penstock.state.manifest import Progress
from penstock.tasks.iteration.checkpoint import checkpoint_due

ROLLOUT_LOGPROBS = "logprobs_rollout"  # column: log-probs under the distributions that tokens were sampled from
ANSWERED, WAITING, UNUSED = "answered", "waiting", "unused_tokens"  # in the origin of experience that leaves prompts
DESCRIBING = ("prompt_tokens", "response_tokens", "truncated", "policy_version", "loss_mask")


def begin_rollout(
    training: Training, settings: Settings, progress: Progress, engine_version: int | None = None
) -> Rollout:
    """Draw the prompts of the iteration after `progress` and let the engines begin; return the rollout's handle.

    They begin nothing where an interrupted attempt of the iteration left the responses that they would give.

    Args:
        engine_version: policy version of the engines' weights; None: that of `progress`.
    """
    if not training.config.rollout.begins_ahead:  # the rollout after this one had begun, with a policy that is lost
        training.run.ended(settings.iteration + 1).unlink(missing_ok=True)
    this_round = next_round(training, settings.iteration, progress)
    prompts = _rows(training, this_round.rows_P)
    rollout, generation = Rollout(settings.iteration, f"{settings.iteration}/rollout"), None
    portions = _portions(training, this_round, progress.policy_version)
    if not _left_behind(training, settings, progress, BegunRollout(this_round, prompts, None)):
        request = _request(training, settings, this_round, prompts, rollout.key, 0, progress.iteration)
        told = () if portions is None else (portions.hear,)
        newest = progress.policy_version if engine_version is None else engine_version
        generation = _begin(training, settings, this_round, request, newest, told)
    begun = BegunRollout(this_round, prompts, generation)
    if portions is not None:
        begun = StreamedRollout(this_round, prompts, generation, portions)
    training.session().rollouts[rollout.key] = begun
    return rollout


def begin_rollout_ahead(training: Training, progress: Progress, stage: Stage, *, scored: bool) -> Rollout | None:
    """Begin the rollout after the one that `stage` was made of, before the update, if the recipe says so.

    Its engines get the new weights when they are there, between two decoding steps. It begins once the batch before is
    complete, so no token is trained on that is older than `rollout.stream.staleness` updates: one for the update that
    is to come, and one for each round that its prompt has been under way.

    Args:
        scored: whether the batch has its rewards and nothing more is generated for it. Before, a rollout begins only
            where that decides neither what it has to wait for nor which prompts it gets.
    """
    done, experience = progress.iteration + 1, stage.experience
    if not training.config.rollout.begins_ahead or done == training.config.iterations:
        return None
    if not scored and (more_is_generated(training.config.algorithm) or draws_by_rewards(training)):
        return None
    cursor = progress.prompt_cursor + experience.prompts
    ahead = progress.advanced(iteration=done, policy_version=done, prompt_cursor=cursor, deferred=experience.deferred)
    return begin_rollout(training, next_settings(training, ahead), ahead, progress.policy_version)


def more_is_generated(algorithm: AlgorithmConfig) -> bool:
    """Whether an iteration generates more once its batch is there: further prompts, or greedy responses."""
    return algorithm.dynamic_sampling is not None or "greedy" in algorithm.needs


def begin_next_rollout(training: Training, progress: Progress) -> Rollout | None:
    """Begin the rollout after `progress`, unless a checkpoint comes first that the engines themselves write."""
    config, done = training.config, progress.iteration
    if done == config.iterations or (checkpoint_due(config, done) and not training.session().snapshots):
        return None
    return begin_rollout(training, next_settings(training, progress), progress)


@task(task_run_name="rollout-{settings.iteration:06d}", cache_policy=NO_CACHE)
def rollout(training: Training, settings: Settings, begun: Rollout) -> Stage:
    """Wait for the responses of a rollout that has begun, and make the experience of them."""
    session, path = training.session(), training.run.experience(begun.iteration)
    metrics, wanted_at = dict[str, float](), time.perf_counter()
    session.say("rollout")
    with timed(training, metrics, "rollout") as span:
        taken = session.rollouts.pop(begun.key)
        if taken.generation is None:
            columns, origin = read_columns(path, _describing(path)), origin_of(path)
        else:
            responses = take_responses(training, taken.generation)
            span.began -= responses.metrics["rollout/ahead_s"]
            columns = experience_columns(training, settings, taken.prompts, responses)
            origin = sampled_with(training, settings, taken.round)
            origin |= what_is_left(training, begun.iteration, taken.round, responses)
            write_columns_apart(path, columns, origin)
            metrics |= responses.metrics | _ahead_figures(training, taken.generation, wanted_at)
        experience = describe(path, columns, taken.round.drawn, origin)
        figures = experience_figures(training, begun, taken.round, experience, columns, origin)
    training.run.ended(begun.iteration).unlink(missing_ok=True)
    if taken.generation is not None:
        metrics["rollout/tokens_per_s"] = experience.response_tokens / metrics["time/rollout_s"]
        if (ended := taken.generation.request.ended) is not None:
            metrics["rollout/taken_over"] = float(len(ended.positions))
    return Stage(experience, metrics | figures)


def _ahead_figures(training: Training, generation: BegunGeneration, wanted_at: float) -> dict[str, float]:
    """Return who waited for whom where rollouts begin ahead: the update for the batch, the engines for the update.

    Args:
        wanted_at: when nothing was left to do but to wait, `time.perf_counter`.
    """
    session, replies = training.session(), generation.replies.result()
    before, session.rollout_ended = session.rollout_ended, replies.ended
    if not training.config.rollout.begins_ahead:
        return {}
    pause = {} if before is None else {"rollout/engine_pause_s": replies.began - before}
    return pause | {"rollout/batch_wait_s": max(0.0, replies.ended - wanted_at)}


@dataclass(frozen=True)
class FurtherRollout:
    """Answers to further prompts of an iteration.

    Attributes:
        columns: of their experience.
        drawn: prompts that were drawn for it.
        unused_tokens: sampled in vain beyond those before; negative if what seemed so is used now.
        origin: what changes in the origin of the iteration's experience.
    """

    columns: dict[str, Any]
    drawn: int
    unused_tokens: int
    origin: dict[str, Any]


def further_rollout(
    training: Training, settings: Settings, experience: ExperienceRef, cursor: int, missing: int, more: int, number: int
) -> FurtherRollout:
    """Answer further prompts of an iteration, to replace groups.

    Args:
        experience: that there is.
        cursor: prompts drawn from the data before.
        missing: groups to replace.
        more: prompts that should be enough.
        number: of the rollout within the iteration, from 1 on.
    """
    this_round = further_round(training, settings.iteration, cursor, missing, more, experience.deferred)
    prompts, key = _rows(training, this_round.rows_P), f"{settings.iteration}/resample-{number}"
    request = _request(training, settings, this_round, prompts, key, 2 + number, settings.iteration)
    generation = begin_generation(training, request, scoring_ahead(training, settings.iteration, prompts))
    responses = take_responses(training, generation)
    columns = experience_columns(training, settings, prompts, responses)
    left = what_is_left(training, settings.iteration, this_round, responses)
    unused = left.get(UNUSED, 0) - _lost_if_left(training, request.carried)
    changed = {name: left[name] for name in (WAITING, CARRIED) if name in left}
    return FurtherRollout(columns, this_round.drawn, unused, changed)


def _rows(training: Training, rows_P: np.ndarray) -> pd.DataFrame:
    return training.session().prompts["train"].frame.iloc[rows_P]


def _begin(
    training: Training,
    settings: Settings,
    this_round: Round,
    request: GenerationRequest,
    policy_version: int,
    told: Sequence[News],
) -> BegunGeneration:
    """Let the engines begin an iteration's first round, but for what had ended when it was begun before and cut off."""
    hearers = (*scoring_ahead(training, settings.iteration, request.prompts), *told)
    if not keeps_ended(training):
        return begin_generation(training, request, hearers)
    dependent = sampled_with(training, settings, this_round)
    sampled_all = None if training.config.rollout.begins_ahead else policy_version
    origin = origin_of_ended(dependent, sampled_all, request.prompts, request.carried)
    kept = EndedFile(training.run.ended(settings.iteration), origin)
    if (ended := kept.read(policy_version)) is not None:
        count = len(ended.positions)
        said = "iteration %d: %d responses had ended when the rollout was cut off, and are not generated again"
        get_run_logger().info(said, settings.iteration, count)
        request = dataclasses.replace(request, ended=ended, sampling=other_streams(request.sampling, count))
    return begin_generation(training, request, hearers, kept)


def _request(
    training: Training,
    settings: Settings,
    this_round: Round,
    prompts: pd.DataFrame,
    key: str,
    purpose: int,
    left_by: int,
) -> GenerationRequest:
    """Return what the engines are asked for in a round, which may go on with what iteration `left_by` has left."""
    return GenerationRequest(
        prompts,
        key,
        sampling(training, settings, purpose),
        wanted=this_round.wanted,
        required=this_round.required,
        carried=begun_before(training, left_by, this_round.begun_before) if this_round.goes_on else None,
        together=this_round.together,
        tell_all=training.config.rollout.in_portions,
    )


def _portions(training: Training, this_round: Round, policy_version: int) -> Portions | None:
    """Return what will hear of the responses, where the gradient is summed while others are generated."""
    config, session = training.config.rollout, training.session()
    if not config.in_portions:
        return None
    fixed = session.reproducible and session.elastic is None
    engines = session.rollout_engines if fixed else 1
    begun, wanted = len(this_round.begun), this_round.wanted
    return Portions(begun, config.samples, config.portions, engines, policy_version, wanted)


def experience_columns(
    training: Training, settings: Settings, prompts: pd.DataFrame, responses: Responses
) -> dict[str, Any]:
    """Return the columns of new experience.

    Args:
        prompts: that the engines were given.
        responses: to all of them, or to some.
    """
    config, prompts = training.config, prompts.iloc[responses.answered_P]
    version = settings.iteration - 1 if config.rollout.begins_ahead else responses.policy_version
    samples, several = config.rollout.samples, config.conversations
    rows_of_prompt = samples * several
    repeats = np.repeat(np.arange(len(prompts)), rows_of_prompt)
    ids = prompts["prompt_id"].to_numpy()[repeats]
    texts, tokens = responses.prompts_of(prompts, rows_of_prompt)
    columns = {
        "sample_id": [sample_id(settings.iteration, name, n % rows_of_prompt) for n, name in enumerate(ids)],
        "prompt_id": list(ids),
        "group": np.repeat(np.arange(len(prompts) * several), samples),  # of a prompt, and of an agent
        "prompt": texts,
        "response": responses.texts,
        "prompt_tokens": tokens,
        "response_tokens": responses.tokens,
        "loss_mask": responses.loss_mask,
        "truncated": responses.truncated_B,
        "policy_version": np.full(len(ids), version),
        **responses.episodes,
    }
    if (images := images_of(prompts)) is not None:
        columns[IMAGES] = images.take(repeats)
    if config.data.agents is not None:
        columns[AGENT] = agent_numbers(prompts, config.data.agents, "data.train")[repeats]
    if config.players:
        columns[AGENT] = numbers_of_players(len(prompts), several, samples)
    if responses.logprobs is not None:
        columns[ROLLOUT_LOGPROBS] = responses.logprobs
    if responses.policy_versions is not None and config.rollout.goes_on:
        columns[POLICY_VERSIONS] = responses.policy_versions
    if responses.routes is not None:
        columns[ROUTES] = responses.routes
    return columns


def sampling(training: Training, settings: Settings, purpose: int = 0) -> Sampling:
    """Return how tokens are sampled in a rollout of this iteration.

    Args:
        purpose: tells the iteration's generations apart in their seeds. 0: its first rollout; 1: evaluation; 2: the
            greedy baseline; from 3 on: further rollouts.
    """
    config = training.config.rollout
    return Sampling(
        samples=config.samples,
        temperature=settings.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_response_tokens,
        ignore_eos=config.ignore_eos,
        seed=[training.config.seed, settings.iteration, purpose],
        logprobs=training.config.algorithm.correction is not None,
        routes=training.config.actor.replays and purpose not in (1, 2),  # of what is learnt from
    )


def sampled_with(training: Training, settings: Settings, this_round: Round) -> dict[str, Any]:
    """Return what the responses of an iteration's first rollout depend on, besides policy and prompts."""
    environment = training.config.environment
    sampled_with = dataclasses.asdict(sampling(training, settings))
    del sampled_with["seed"]
    if not sampled_with["routes"]:  # experience of versions that knew of none stays of use
        del sampled_with["routes"]
    return {
        "seed": training.config.seed,
        **sampled_with,
        "environment": environment.model_dump(mode="json") if environment is not None else None,
        **({"prompts_begun": len(this_round.begun)} if this_round.wanted is not None else {}),
        **({"portion_count": config.portions} if (config := training.config.rollout).in_portions else {}),
    }


def what_is_left(training: Training, iteration: int, this_round: Round, responses: Responses) -> dict[str, Any]:
    """Return which prompts make the batch, which wait, and what was sampled for these, as JSON; nothing of all.

    What there is of responses to those that go on is written for the next rollout.
    """
    answered = responses.answered_P.tolist()
    waiting = this_round.waiting(answered)
    if this_round.wanted is None and not waiting:
        return {}
    rows = [prompt.as_row() for prompt in waiting]
    carried, unused = {}, responses.unused_tokens + _lost_if_left(training, responses.left)
    if responses.left is not None:
        left = this_round.left(answered)
        going_on = [position for position, prompt in enumerate(left) if not prompt.rests]
        kept = of_prompts(responses.left, going_on, len(left))
        unused += len(responses.left.tokens.values_T) - len(kept.tokens.values_T)
        carried[CARRIED] = keep_carried(training.run, iteration, kept, [left[position] for position in going_on])
    return {ANSWERED: answered, WAITING: rows, UNUSED: unused, **carried}


def _lost_if_left(training: Training, left: CarriedResponses | None) -> int:
    """Return how many tokens an iteration loses with what it leaves: none where the next one goes on with it."""
    return 0 if left is None or training.config.rollout.goes_on else len(left.tokens.values_T)


def _left_behind(training: Training, settings: Settings, progress: Progress, begun: BegunRollout) -> bool:
    """Whether an interrupted attempt left this rollout's responses; if it left others, the difference is logged."""
    path = training.run.experience(settings.iteration)
    if not _is_whole(path, progress.policy_version):
        return False
    differences = _differences(training, settings, begun, path)
    if differences:
        get_run_logger().warning(
            "iteration %d: responses are generated anew, those of the interrupted attempt were sampled with %s",
            settings.iteration,
            ", ".join(differences),
        )
    return not differences


def _differences(training: Training, settings: Settings, begun: BegunRollout, path: Path) -> list[str]:
    """Return in words what the responses in an experience file were sampled with that this rollout's would not be."""
    was, now = origin_of(path), sampled_with(training, settings, begun.round)
    names = [*now, *({"prompts_begun"} & was.keys() - now.keys())]
    sampled = [f"{name} {was.get(name)} instead of {now.get(name)}" for name in names if was.get(name) != now.get(name)]
    if CARRIED in was and not is_kept(training.run, settings.iteration, was[CARRIED]):
        sampled.append(f"{training.run.carried(settings.iteration)} beside them, which is another now")
    count = len(begun.prompts)
    answered = [position for position in was.get(ANSWERED, range(count)) if position < count]
    rows_of_prompt = training.config.rollout.samples * training.config.conversations
    wanted_ids = list(begun.prompts["prompt_id"].iloc[answered].repeat(rows_of_prompt))
    same_prompts = read_columns(path, ["prompt_id"])["prompt_id"] == wanted_ids
    return sampled if same_prompts else [*sampled, "other prompts"]


def _describing(path: Path) -> list[str]:
    versions = [POLICY_VERSIONS] if POLICY_VERSIONS in column_names(path) else []
    return [*DESCRIBING, *episode_column_names(path), *versions]


def _is_whole(path: Path, policy_version: int) -> bool:
    """Whether a file holds the whole first rollout of this policy, and no other."""
    if not path.exists():
        return False
    names = column_names(path)
    if "response_tokens" not in names:  # the machine was restarted before they had reached the disk
        return False
    if RESAMPLED in names:  # the file does not say how many prompts it took: all rollouts are repeated, alike
        return False
    return bool((read_columns(path, ["policy_version"])["policy_version"] == policy_version).all())


def describe(path: Path, columns: dict[str, Any], prompts: int, origin: Mapping[str, Any]) -> ExperienceRef:
    """Return the handle of an experience file.

    Args:
        columns: of it, `DESCRIBING` at least.
        prompts: drawn for it.
        origin: what it says that its responses depend on.
    """
    return ExperienceRef(
        path=str(path),
        samples=len(columns["truncated"]),
        prompt_tokens=int(columns["prompt_tokens"].offsets_B1[-1]),
        response_tokens=int(columns["response_tokens"].offsets_B1[-1]),
        policy_version=int(columns["policy_version"][0]),
        prompts=prompts,
        deferred=waiting_after(origin),
    )


def waiting_after(origin: Mapping[str, Any]) -> tuple[Deferred, ...]:
    """Return the prompts that wait once an experience file of this origin is made."""
    return tuple(Deferred(*prompt) for prompt in origin.get(WAITING, ()))


def experience_figures(
    training: Training,
    begun: Rollout,
    this_round: Round,
    experience: ExperienceRef,
    columns: dict[str, Any],
    origin: Mapping[str, Any],
) -> dict[str, float]:
    """Return the figures of a rollout's experience: lengths, what its round has put off, how old tokens are.

    Args:
        columns: of the experience, `DESCRIBING` at least.
        origin: what it says that its responses depend on.
    """
    unused = origin.get(UNUSED, 0)
    figures = _length_figures(training, begun.key, columns)
    figures |= round_figures(training.config.rollout, begun.iteration, this_round, experience, unused)
    return figures | staleness_figures(experience.policy_version, columns.get(POLICY_VERSIONS), columns["loss_mask"])


def _length_figures(training: Training, key: str, columns: dict[str, Any]) -> dict[str, float]:
    lengths = columns["response_tokens"].lengths_B
    figures = generation_figures(training, key, columns["prompt_tokens"].lengths_B, lengths)
    if PATH_ENDS in columns and (columns[PATH_ENDS].lengths_B > 1).any():
        figures.pop("rollout/mfu", None)  # it is that of one conversation each
    return {
        "rollout/tokens": float(lengths.sum()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_share": float(np.mean(columns["truncated"])),
        **episode_figures(columns, training.config.conversations),
        **figures,
    }
